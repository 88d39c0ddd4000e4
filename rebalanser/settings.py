"""Every setting, with its unit in its name, checked against the others when it is made (RB-21)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, Unpack

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from rebalanser.core.group import Mode, NodeOptions, OnOverrun, Timings
from rebalanser.core.group.types import MAX_REJOIN_GRACE_S
from rebalanser.errors import InvalidArgument, InvalidName, InvalidSettings
from rebalanser.folders import PRIVATE, file_mode_of
from rebalanser.redaction import redact
from rebalanser.registry.keys import check_attribute, check_name, check_tags

DEFAULT_LEASE_TTL_S = 10.0
_TOLERANCE_S = 1e-9
PREFIX = "REBALANSER_"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_TIMEOUT = TypeAdapter[float](Annotated[float, Field(strict=True, allow_inf_nan=False)])


def _share_of_lease(share: float) -> Any:
    """A default that follows the lease, so that changing ``lease_ttl_s`` alone keeps RB-21."""
    return Field(default_factory=lambda data: data.get("lease_ttl_s", DEFAULT_LEASE_TTL_S) * share)


class Values(TypedDict, total=False):
    """The arguments of ``Settings``, for type checkers: a mistyped name is an error before it is run."""

    lease_ttl_s: float
    heartbeat_interval_s: float
    stop_timeout_s: float
    safety_margin_s: float
    registry_timeout_s: float
    clock_drift_ratio: float
    start_timeout_s: float
    connect_timeout_s: float
    settle_time_s: float
    min_rebalance_interval_s: float
    retry_initial_s: float
    retry_max_s: float
    rejoin_initial_s: float
    rejoin_max_s: float
    mode: Mode | Literal["cooperative", "eager"]
    start_in_batches: bool
    may_lead: bool
    on_overrun: OnOverrun | Literal["report", "kill"]
    attributes: Mapping[str, str]
    capacity: float | None
    tags: Iterable[str]
    zone: str
    rejoin_grace_s: float
    history_dir: Path | str | None
    history_max_bytes: int
    history_file_mode: str
    history_topic: str | None
    fenced: bool


def _checked_mode(given: Any) -> str:
    """The mode as octal digits, which a number such as 640 is taken for; 0o640 is another number."""
    try:
        file_mode_of(str(given))
    except InvalidSettings as error:
        why = str(error)
        if isinstance(given, int) and given < 0o1000 and given & 0o711 == 0o600:
            why = f"{given} is no mode of a file: write it as text, '0{given:03o}'"
        raise PydanticCustomError("file_mode", "{why}", {"why": why}) from None
    return str(given)


def _checked_tags(given: Any) -> Any:
    """The tags as a set. A text has them between commas, as in the environment."""
    if isinstance(given, str):
        given = [tag.strip() for tag in given.split(",")] if given.strip() else []
    try:
        return check_tags(given) if isinstance(given, Iterable) else given
    except InvalidName as error:
        raise PydanticCustomError("tag", "{why}", {"why": str(error)}) from None


def _checked_zone(given: str) -> str:
    try:
        return given and check_name(given, "zone")
    except InvalidName as error:
        raise PydanticCustomError("zone", "{why}", {"why": str(error)}) from None


class Settings(BaseSettings):
    """Settings of a node. Each can be set in the environment, as ``REBALANSER_LEASE_TTL_S=5``.

    Raises:
        InvalidSettings: a value is out of range, or the timings cannot keep RB-21; with the numbers.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    lease_ttl_s: Seconds = Field(
        default=DEFAULT_LEASE_TTL_S,
        description="how long the registry waits for a node before it gives the node's resources away",
    )
    heartbeat_interval_s: Seconds = _share_of_lease(1 / 6)
    """Seconds between heartbeats, which renew the lease. Default: a sixth of the lease."""
    stop_timeout_s: Seconds = _share_of_lease(0.4)
    """Maximum seconds of OnStop. Default: four tenths of the lease."""
    safety_margin_s: SecondsOrZero = _share_of_lease(0.1)
    """Seconds between the end of access and the earliest end of the lease. Default: a tenth of the lease."""
    registry_timeout_s: Seconds = _share_of_lease(0.125)
    """Maximum seconds of a request to the registry. Default: an eighth of the lease."""
    clock_drift_ratio: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Maximum drift of the registry's clock against the node's: 0.01 is a second in 100 s."""
    start_timeout_s: Seconds = 60.0
    """Seconds of OnStart after which it is reported (RB-25)."""
    connect_timeout_s: Seconds = 10.0
    """Maximum seconds to wait at start for the registry, and for the node to be registered."""
    settle_time_s: SecondsOrZero = 0.0
    """Seconds in which a leader collects further changes after a first one (RB-8)."""
    min_rebalance_interval_s: SecondsOrZero = 0.1
    """Minimum seconds between two rebalances (RB-8)."""
    retry_initial_s: Seconds = 0.05
    """Seconds before a failed command is sent again; they double each time."""
    retry_max_s: Seconds = 1.0
    """Maximum seconds before a failed command is sent again."""
    rejoin_initial_s: Seconds = 0.5
    """Seconds before joining again after a handler raised; they double each time (RB-24)."""
    rejoin_max_s: Seconds = 30.0
    """Maximum seconds before joining again."""
    mode: Mode = Mode.COOPERATIVE
    """``cooperative`` stops only what leaves and starts what arrives, ``eager`` everything (RB-17)."""
    start_in_batches: bool = True
    """In cooperative mode: start what is free at once, without waiting for what others still hold."""
    may_lead: bool = True
    """True if the node may become leader. At least one node of a group must."""
    on_overrun: OnOverrun = OnOverrun.REPORT
    """``report`` a handler that overruns, or ``kill`` the process before its lease can end (RB-34)."""
    attributes: dict[str, str] = Field(default_factory=dict)
    """Attributes of the node that its state shows, such as an address. In the environment it is
    a JSON object: ``REBALANSER_ATTRIBUTES='{"version": "1.4"}'``."""
    capacity: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The greatest sum of weights of resources that the node owns; without limit where unset (RB-37)."""
    tags: Annotated[frozenset[str], NoDecode, BeforeValidator(_checked_tags)] = frozenset()
    """Tags that resources may need, such as ``gpu`` (RB-37). In the environment they are
    separated by commas: ``REBALANSER_TAGS=gpu,ssd``."""
    zone: Annotated[str, AfterValidator(_checked_zone)] = ""
    """The zone that the node is in, such as a data centre, for resources that are spread over zones
    (RB-37)."""
    rejoin_grace_s: Annotated[float, Field(ge=0, le=MAX_REJOIN_GRACE_S, allow_inf_nan=False)] = 0.0
    """Seconds for which the node's name keeps its share once it has left or died: the node that comes back
    under the name gets exactly it (RB-39). 0 keeps nothing. It needs a name that stays the same:
    ``Group(…, node="worker-1")``."""
    history_dir: Path | None = None
    """The folder to which the node appends what it did, as JSON lines; none where unset."""
    history_max_bytes: Annotated[int, Field(ge=65_536)] = 512 * 1024 * 1024
    """Maximum bytes of one node's history files; the oldest are deleted first."""
    history_file_mode: Annotated[str, BeforeValidator(_checked_mode)] = PRIVATE
    """Mode of new history files, as octal digits; ``0640`` lets the group read them."""
    history_topic: str | None = Field(default=None, repr=False)
    """The topic to which the node writes what it did, ``kafka://HOST:PORT[,HOST:PORT]/TOPIC``; may stand
    beside ``history_dir``."""
    fenced: bool = False
    """The application says that every receiver of its writes checks the fencing token. Written into the
    history, for the audit to tell harm from none; the node acts no differently."""

    def __init__(self, **values: Unpack[Values]) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidSettings(_one_line(error, given=values)) from error
        except InvalidSettings as error:
            named = re.findall(r"\w+_s\b", str(error))
            if variables := sorted(_variables(named, values)):
                raise InvalidSettings(f"{error} (from {', '.join(variables)})") from None
            raise
        except SettingsError as error:
            raise InvalidSettings(
                f"the environment can't be read: {error} ({error.__cause__}); "
                """REBALANSER_ATTRIBUTES is a JSON object, such as '{"version": "1.4"}'"""
            ) from error

    @classmethod
    def of(cls, given: Settings | None) -> Settings:
        """The settings that were given, else those of the environment.

        Raises:
            InvalidSettings: something else was given.
        """
        if given is None:
            return cls()
        if not isinstance(given, Settings):
            raise InvalidSettings(
                f"settings must be a rebalanser.Settings, not {type(given).__name__}: "
                "write settings=rebalanser.Settings(lease_ttl_s=5)"
            )
        return given

    @model_validator(mode="after")
    def _keeps_the_promises(self) -> Self:
        """Refuse what cannot keep RB-21, with the numbers."""
        detect_s = 2 * self.heartbeat_interval_s + self.registry_timeout_s
        drift_s = self.lease_ttl_s * self.clock_drift_ratio
        needed_s = detect_s + self.stop_timeout_s + self.safety_margin_s + drift_s
        if needed_s > self.lease_ttl_s + _TOLERANCE_S:
            raise InvalidSettings(
                "OnStop could not return before the lease ends: two heartbeats and a time-out "
                f"(2 x heartbeat_interval_s {self.heartbeat_interval_s:g} + registry_timeout_s "
                f"{self.registry_timeout_s:g}) + stop_timeout_s {self.stop_timeout_s:g} + safety_margin_s "
                f"{self.safety_margin_s:g} + clock drift {drift_s:g} = {needed_s:g} s, "
                f"but lease_ttl_s is {self.lease_ttl_s:g}"
            )
        if self.retry_initial_s > self.retry_max_s:
            raise InvalidSettings(
                f"retry_initial_s {self.retry_initial_s:g} is over retry_max_s {self.retry_max_s:g}"
            )
        if self.rejoin_initial_s > self.rejoin_max_s:
            raise InvalidSettings(
                f"rejoin_initial_s {self.rejoin_initial_s:g} is over rejoin_max_s {self.rejoin_max_s:g}"
            )
        for name, value in self.attributes.items():
            check_attribute(name, value, "node")
        return self

    @property
    def timings(self) -> Timings:
        """The times that the protocol runs on."""
        return Timings(
            lease_ttl_s=self.lease_ttl_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            stop_timeout_s=self.stop_timeout_s,
            start_timeout_s=self.start_timeout_s,
            safety_margin_s=self.safety_margin_s,
            clock_drift_ratio=self.clock_drift_ratio,
            settle_time_s=self.settle_time_s,
            min_rebalance_interval_s=self.min_rebalance_interval_s,
            retry_initial_s=self.retry_initial_s,
            retry_max_s=self.retry_max_s,
            rejoin_initial_s=self.rejoin_initial_s,
            rejoin_max_s=self.rejoin_max_s,
        )

    @property
    def node_options(self) -> NodeOptions:
        """Options of the protocol's node, beside its timings."""
        return NodeOptions(start_in_batches=self.start_in_batches, on_overrun=self.on_overrun)


def check_argument(kind: TypeAdapter[Any], value: object, argument: str) -> None:
    """Check that an argument is of this kind.

    Raises:
        InvalidArgument: it is not; the message names the argument, and what is expected.
    """
    try:
        kind.validate_python(value)
    except ValidationError as error:
        raise InvalidArgument(_one_line(error, argument=argument)) from None


def check_timeout(timeout_s: float | None) -> None:
    """Check that a timeout is a number of seconds, or None. Raises ``InvalidArgument``."""
    if timeout_s is not None:
        check_argument(_TIMEOUT, timeout_s, "timeout_s")


def _variables(names: Collection[str], given: Collection[str]) -> set[str]:
    """The variables of the environment that some settings come from, as they were not given."""
    written = {name.upper() for name in os.environ}
    variables = {f"{PREFIX}{name}".upper() for name in names if name not in given}
    return variables & written


def _one_line(
    error: ValidationError, argument: str | None = None, given: Collection[str] | None = None
) -> str:
    """All problems of an argument, or of settings of which some were given."""
    above = [] if argument is None else [argument]
    lines = []
    for problem in error.errors(include_url=False):
        if problem["type"] == "default_factory_not_called":
            continue
        place = [*above, *map(str, problem["loc"])]
        reason, source = problem["msg"], ""
        if given is not None and place:
            if problem["type"] == "extra_forbidden":
                near = get_close_matches(place[0], Settings.model_fields, 1)
                reason = "there is no such setting" + "".join(f"; is {each} meant?" for each in near)
            source = "".join(f" from {each}" for each in _variables(place[:1], given))
        lines.append(
            f"{'.'.join(place) or 'settings'}: {reason} (got {redact(repr(problem['input']))}{source})"
        )
    return "; ".join(lines)
