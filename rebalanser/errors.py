"""Every error that Rebalanser raises, grouped by what the caller must do.

==========================  ====================================================================
``RetryLater``         nothing was done, or it may be asked again: try again later
``StopAccess``         this process must not touch the resource any more
``FixConfiguration``   a person must change something; trying again cannot help
``InternalError``      a broken invariant of Rebalanser itself: please report it
==========================  ====================================================================

A failed outcome and an unknown outcome are never the same error: ``RegistryUnavailable`` says that
the request had no effect, ``OutcomeUnknown`` that it may have had one, now or a little later.
"""

from __future__ import annotations


class RebalanserError(Exception):
    """The root of the tree. Its message is one line that says what happened and what to do."""


class RetryLater(RebalanserError):
    """Nothing is wrong with the request: ask again later."""


class RegistryUnavailable(RetryLater):
    """The registry could not be reached or refused to work now; the request had no effect."""


class OutcomeUnknown(RetryLater):
    """The request was sent and no answer came: it may take effect, now or later. Read back, never assume."""


class HandlerFailed(RetryLater):
    """A handler of the host application raised; the original error is its ``__cause__`` (RB-24)."""


class NotSettled(RetryLater):
    """The group did not settle within the time that the caller gave."""


class Superseded(RetryLater):
    """A later command for the same application has taken the place of this one."""


class StopAccess(RebalanserError):
    """This process does not own the resource (any more): it must stop touching it."""


class NotOwned(StopAccess):
    """The resource is not owned by this node now; for receivers of your own that check tokens."""


class LeaseNotFound(StopAccess):
    """The registry does not know the lease (any more): it ended, or was revoked (RB-20)."""


class Fenced(StopAccess):
    """A newer process holds this role or claim: writes of this process are refused (SH-7, SK-10)."""


class Forked(StopAccess):
    """An object that the parent opened was used in a child of ``fork``; its leases and claims stay there."""


class FixConfiguration(RebalanserError):
    """Something that a person set is wrong; the message says what to change."""


class UnknownScheme(FixConfiguration):
    """The URL's scheme belongs to no known backend; the message names the known ones."""


class MissingExtra(FixConfiguration):
    """The backend is known but its packages are not installed; the message names the extra."""


class NotARegistry(FixConfiguration):
    """Groups can live there, but it offers no keys, leases and watches of one's own."""


class InvalidUrl(FixConfiguration):
    """The registry URL cannot be used as written."""


class InvalidSettings(FixConfiguration):
    """Settings contradict each other or the registry; the message has the numbers (RB-21)."""


class InvalidName(FixConfiguration):
    """A group, node, resource or attribute name cannot be stored (RB-33)."""


class InvalidArgument(FixConfiguration):
    """An argument is of a wrong type or out of range; the message names it and what is expected."""


class InvalidHandlers(FixConfiguration):
    """No handler is registered, or handlers that exclude each other are."""


class InvalidLoad(FixConfiguration):
    """A load that was reported is negative, infinite or no number (AU-7)."""


class InvalidTask(FixConfiguration):
    """A task can't be enqueued or worked on as it is; the message says what is wrong with it."""


class TaskExists(InvalidTask):
    """The id is taken by a task with other content (SK-3)."""


class UnknownGroup(FixConfiguration):
    """There is no group of this name; the message says where it was looked for."""


class UnknownQueue(FixConfiguration):
    """There is no queue of this name; the message names those that there are."""


class UnknownTask(InvalidTask):
    """There is no task of this id: it was never enqueued, or it was collected."""


class DependencyCycle(InvalidTask):
    """The task would wait for itself, by way of the tasks that it depends on."""


class TaskFailed(FixConfiguration):
    """The task that was waited for is dead or cancelled; the message says by which error its last try ended.

    ``error_type`` is the name of that error's type, such as ``ValueError``; empty where no try has failed.
    ``error_text`` is its text as stored, with the traceback of the body.
    """

    def __init__(self, message: str, *, error_type: str = "", error_text: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type
        self.error_text = error_text


class UnknownApplication(FixConfiguration):
    """The cluster knows no application of this name; the message names those that it knows."""


class UnknownWorker(FixConfiguration):
    """The cluster knows no worker of this id; the message names those that it knows."""


class ApplicationFailed(FixConfiguration):
    """The application was refused, or failed on every worker that could take it; with the reason."""


class RegistryRefused(FixConfiguration):
    """The registry answered and said no, for a reason that trying again does not change."""


class AccessDenied(RegistryRefused):
    """Wrong credentials, a wrong certificate, or no permission."""


class QuotaExceeded(RegistryRefused):
    """The registry's storage is over its quota; it refuses lease grants too, so that nodes can't join."""


class RequestTooLarge(RegistryRefused):
    """The request is over a limit of the registry."""


class UnusableStore(RegistryRefused):
    """The store cannot be used: no database, read-only, on a network filesystem, or of a newer version."""


class InvalidArchive(FixConfiguration):
    """An application's archive must not be unpacked; the message names the entry (SH-16)."""


class InvalidManifest(FixConfiguration):
    """An application's manifest cannot be used; the message has every error with its place (SH-4)."""


class UnusableFolder(FixConfiguration):
    """A worker's data folder cannot be used, or another worker uses it."""


class UnusableHistory(FixConfiguration):
    """The history cannot be read or written there; the message says what was found instead (AU-1)."""


class UnwritableAnswer(FixConfiguration):
    """The command has done its work, but standard output does not take the answer."""


class UnusableOutput(FixConfiguration):
    """The results can't be written there: no room, no right, or something else is there already."""


class InvalidState(RebalanserError):
    """A call that makes no sense now, such as starting a group twice."""


class InternalError(RebalanserError):
    """A broken invariant of Rebalanser itself. Please report it with the log."""
