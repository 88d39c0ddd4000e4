"""A feed keeps a group's resources equal to what runs, and touches nothing else."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser import Admin
from rebalanser import feed as feed_module
from rebalanser.core.shiva.records import AssignmentDocument
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Mode,
)
from rebalanser.errors import (
    InvalidName,
    InvalidState,
    InvalidUrl,
    MissingExtra,
    RegistryUnavailable,
    UnknownScheme,
    UnusableStore,
)
from rebalanser.feed import (
    FED_BY,
    FED_EPOCH,
    Applications,
    ClusterSource,
    ResourceFeed,
    changes_for,
    started_applications,
)
from rebalanser.state import ResourceState
from rebalanser.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("SH-19")
FEED = "shiva:c"


class FakeSource:
    """A source that says what a test told it, or that it is away."""

    name = "c"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._applications: Applications | None = None
        self._away = False
        self._news = False
        self.reads = 0
        self._taken: tuple[int, int] | None = None
        self._done: tuple[int, int] | None = None

    def say(self, epoch: tuple[int, int], *names: str, away: bool = False) -> tuple[int, int]:
        with self._changed:
            self._applications = Applications(epoch, frozenset(names))
            self._away = away
            self._news = True
            self._changed.notify_all()
        return epoch

    def let_feed(self, epoch: tuple[int, int], *names: str) -> None:
        """Say something, and wait until the feed has acted on it."""
        self.wait_done(self.say(epoch, *names))

    def wait_done(self, epoch: tuple[int, int]) -> None:
        """Wait until the feed has acted on a document: it then waits for the next one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._done == epoch, PATIENCE_S)

    def go_away(self) -> None:
        with self._changed:
            self._away = True
            self._news = True
            self._changed.notify_all()

    def wait_until_read(self, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.reads >= times, PATIENCE_S)

    def read(self, timeout_s: float) -> Applications | None:
        with self._changed:
            self.reads += 1
            self._changed.notify_all()
            if self._away:
                raise RegistryUnavailable("the source is away")
            self._taken = self._applications.epoch if self._applications else None
            return self._applications

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            self._done = self._taken
            self._changed.notify_all()
            news = self._changed.wait_for(lambda: self._news, timeout_s)
            self._news = False
            return news

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def url() -> str:
    return f"memory://feed-{uuid.uuid4().hex}"


@pytest.fixture
def admin(url: str) -> Iterator[Admin]:
    with Admin("group", url) as opened:
        yield opened


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def feed(source: FakeSource, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResourceFeed]:
    made = ResourceFeed(source, "group", url)
    monkeypatch.setattr(made, "_pause", lambda _seconds: None)
    with made:
        yield made


def names(admin: Admin) -> set[str]:
    return {each.resource for each in admin.resources()}


def test_what_runs_is_a_resource_and_what_stopped_is_none(
    admin: Admin, source: FakeSource, feed: ResourceFeed
) -> None:
    source.let_feed((1, 1), "t/c/a", "t/c/b")
    assert names(admin) == {"t/c/a", "t/c/b"}
    source.let_feed((1, 2), "t/c/b", "t/c/d")
    assert names(admin) == {"t/c/b", "t/c/d"}
    source.let_feed((1, 3))
    assert names(admin) == set()


def test_a_source_that_is_away_changes_nothing(admin: Admin, source: FakeSource, feed: ResourceFeed) -> None:
    source.let_feed((1, 1), "a")
    source.go_away()
    source.wait_until_read(source.reads + 3)
    assert names(admin) == {"a"}
    source.let_feed((1, 2), "a", "b")
    assert names(admin) == {"a", "b"}


def test_a_cluster_without_a_document_changes_nothing(url: str, admin: Admin, source: FakeSource) -> None:
    admin.add("fed before", attributes={FED_BY: FEED, FED_EPOCH: "1.1"})
    with ResourceFeed(source, "group", url):
        source.wait_until_read(1)
    assert names(admin) == {"fed before"}


def test_what_operators_added_is_left_alone(admin: Admin, source: FakeSource, feed: ResourceFeed) -> None:
    admin.add("own", "both", weight=3.0)
    admin.add("other feed's", attributes={FED_BY: "shiva:other", FED_EPOCH: "1.1"})
    source.let_feed((1, 1), "both", "a")
    source.let_feed((1, 2))
    assert {each.resource: each.weight for each in admin.resources()} == {
        "own": 3.0,
        "both": 3.0,
        "other feed's": 1.0,
    }


def test_a_feed_that_starts_anew_goes_on_where_the_last_one_was(
    url: str, admin: Admin, source: FakeSource, feed: ResourceFeed
) -> None:
    source.let_feed((2, 5), "a", "b")
    feed.stop()
    late = FakeSource()
    late.say((2, 4), "b", "c")
    with ResourceFeed(late, "group", url):
        late.wait_done((2, 4))
        assert names(admin) == {"a", "b"}, "an older document undoes nothing"
        late.let_feed((3, 1), "c")
        assert names(admin) == {"c"}


def test_a_document_that_only_removes_is_remembered(
    url: str, admin: Admin, source: FakeSource, feed: ResourceFeed
) -> None:
    source.let_feed((1, 1), "a", "b")
    source.let_feed((1, 3), "a")
    late = FakeSource()
    late.say((1, 2), "a", "b")
    with ResourceFeed(late, "group", url):
        late.wait_done((1, 2))
    assert names(admin) == {"a"}


def test_an_older_document_of_the_same_source_is_passed_over(
    url: str, admin: Admin, source: FakeSource
) -> None:
    feed = ResourceFeed(source, "group", url)
    source.say((2, 1))
    feed._feed(source, admin)
    source.say((1, 9), "a")
    feed._feed(source, admin)
    assert names(admin) == set()


def test_a_source_that_was_made_anew_is_told_and_goes_on_once_what_was_fed_is_removed(
    url: str, admin: Admin, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[dict[str, str]] = []
    log = SimpleNamespace(
        info=lambda *_, **__: None, warning=lambda _event, **detail: warnings.append(detail)
    )
    monkeypatch.setattr(feed_module, "_log", log)
    admin.add("fed before", attributes={FED_BY: FEED, FED_EPOCH: "70.2"})
    with ResourceFeed(source, "group", url):
        source.let_feed((5, 1), "a")
        assert names(admin) == {"fed before"}
        source.let_feed((5, 2), "a")
        assert [(each["epoch"], each["fed"]) for each in warnings] == [("5.1", "70.2")]
        admin.remove(["fed before"])
        source.let_feed((5, 3), "a")
        assert names(admin) == {"a"}
        for _ in range(2):  # once it looks again it has done with the first
            reads = source.reads
            source.say((2, 1), "b")
            source.wait_until_read(reads + 1)
        assert names(admin) == {"a"}
        assert [(each["epoch"], each["fed"]) for each in warnings[1:]] == [("2.1", "5.3")]


def test_a_configuration_that_cannot_work_is_told(url: str, source: FakeSource) -> None:
    with pytest.raises(InvalidUrl):
        ResourceFeed("nowhere", "group", url)
    feed = ResourceFeed(source, "", url)
    with pytest.raises(InvalidName):
        feed.run()
    feed.start()
    assert feed.wait(PATIENCE_S)
    with pytest.raises(InvalidName):
        feed.stop()
    feed.stop()


@pytest.mark.parametrize("act", [ResourceFeed.start, ResourceFeed.run])
def test_a_backend_that_is_not_there_is_told_at_once(
    act: Callable[[ResourceFeed], None],
    url: str,
    source: FakeSource,
    monkeypatch: pytest.MonkeyPatch,
    forget_modules: Callable[[str], None],
) -> None:
    for feed in (
        ResourceFeed("redis://127.0.0.1:1/c", "group", url),
        ResourceFeed(source, "group", "no://h:1"),
    ):
        with pytest.raises(UnknownScheme):
            act(feed)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    forget_modules("rebalanser_kafka")
    with pytest.raises(MissingExtra, match=r"pip install 'rebalanser\[kafka\]'"):
        act(ResourceFeed("kafka://127.0.0.1:1/c", "group", url))


def test_a_stop_waits_no_longer_than_asked_for_a_source_that_does_not_answer(url: str) -> None:
    reading, answered = threading.Event(), threading.Event()

    class SilentSource(FakeSource):
        def read(self, timeout_s: float) -> Applications | None:
            reading.set()
            answered.wait(PATIENCE_S)
            return None

    feed = ResourceFeed(SilentSource(), "group", url)
    feed.start()
    assert reading.wait(PATIENCE_S)
    feed.stop(0.0)
    assert not feed.wait(0.0)
    with pytest.raises(InvalidState):
        feed.start()
    answered.set()
    assert feed.wait(PATIENCE_S)
    feed.stop()


def test_it_runs_once(source: FakeSource, url: str) -> None:
    with ResourceFeed(source, "group", url) as feed, pytest.raises(InvalidState):
        feed.start()


class Watch:
    """Documents of a cluster as they come, and an error in their place."""

    def __init__(self, *coming: AssignmentDocument | Exception | None) -> None:
        self._coming = list(coming)
        self.document: AssignmentDocument | None = None
        self.closed = False
        self.wait(0.0)

    def wait(self, _timeout_s: float) -> bool:
        found = self._coming.pop(0)
        if isinstance(found, Exception):
            raise found
        is_newer = found is not None
        self.document = found or self.document
        return is_newer

    def close(self) -> None:
        self.closed = True


def test_a_cluster_is_followed_and_not_asked_for_its_documents_again_and_again() -> None:
    first, second, third = (AssignmentDocument(Epoch(1, number), "l", 0, 1.0) for number in (1, 2, 3))
    watches = [
        Watch(first, None, first, second, UnusableStore("the topic has been made anew")),
        Watch(third, None),
    ]
    opened = list(watches)
    cluster = mock.Mock(read=mock.Mock(return_value=first), watch=lambda _timeout_s: opened.pop(0))
    source = ClusterSource(cluster, PATIENCE_S)
    assert source.read(PATIENCE_S) == Applications((1, 1), frozenset())
    assert [source.wait(0.0) for _ in range(3)] == [False, False, True]
    assert cluster.read.call_count == 1
    assert source.wait(0.0), "what the error is about is told by the next read"
    assert (watches[0].closed, watches[1].closed) == (True, False)
    cluster.read.return_value = second
    assert source.read(PATIENCE_S) == Applications((1, 2), frozenset())
    assert source.wait(0.0), "what came while nothing was followed"
    cluster.read.return_value = third
    source.read(PATIENCE_S)
    assert not source.wait(0.0)
    source.close()
    assert watches[1].closed
    assert cluster.close.called


def resource(name: str, feed: str | None, epoch: tuple[int, int] = (0, 0)) -> ResourceState:
    attributes = {} if feed is None else {FED_BY: feed, FED_EPOCH: f"{epoch[0]}.{epoch[1]}"}
    return ResourceState(
        resource=name,
        assigned_to=None,
        held_by=None,
        owner=None,
        token=None,
        reason=None,
        weight=1.0,
        pin=None,
        attributes=attributes,
        removed=False,
    )


@given(
    running=st.frozensets(st.sampled_from("abcdef")),
    present=st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.sampled_from([None, FEED, "shiva:x"]), st.integers(0, 4))
    ),
)
def test_only_what_this_feed_fed_is_removed(
    running: frozenset[str], present: dict[str, tuple[str | None, int]]
) -> None:
    states = [resource(name, feed, (1, number)) for name, (feed, number) in present.items()]
    changes = changes_for(Applications((1, 2), running), states, FEED)
    mine = {name: number for name, (feed, number) in present.items() if feed == FEED}
    if any(number > 2 for number in mine.values()):
        assert not changes
        return
    after = (present.keys() | changes.add) - changes.remove
    assert changes.remove <= mine.keys()
    assert after == running | (present.keys() - mine.keys())


@pytest.mark.parametrize("state", ApplicationState)
def test_applications_count_from_their_start_to_their_end(state: ApplicationState) -> None:
    entry = ApplicationEntry("command", state, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
    application = ApplicationId("t", "c", "a")
    document = AssignmentDocument(Epoch(3, 4), "leader", 0, 1.0, applications={application: entry})
    started = started_applications(document)
    assert started.epoch == (3, 4)
    ended = {"finished", "stopping", "failed", "refused"}
    assert started.names == (set() if state.value in ended else {"t/c/a"})
