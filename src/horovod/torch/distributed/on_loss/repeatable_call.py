"""A call of a group with all that it takes to make it again, among other ranks.

The engine never writes into the script's tensors: it writes into memory of the call. So the inputs stay what they were until
the call is handed out, and a lost collective leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.datatypes import Array
from horovod.comm.spans import Vectors
from horovod.core.errors import HorovodInternalError, RankLostError
from horovod.core.negotiation.messages import UNNAMED, Operation, numbered_name
from horovod.core.requests.handle import Driver, Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.core.submission.prepared import submit
from horovod.core.submission.requests import prepared_call
from horovod.torch.distributed.on_loss.carrier import Carrier
from horovod.torch.distributed.submission import PREFIX

_REPEATABLE = {"all_reduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"}
"""The operations whose arguments have a meaning for fewer ranks, too."""


@dataclass(eq=False)
class RepeatableCall:
    """One call.

    Args:
        number: its number.
        what: the operation, for errors.
        line: the line of the script that made it.
        operation, inputs, outputs, reduction, splits, allocate, described: as of :meth:`Submitter.start`. The outputs are the
            script's.
        origins: by rank, as the script saw the ranks when it made the call, the rank that the process had first.
        root: the rank of the root, as the script saw it; -1 if there is none.
        of_first: whether the root is the first rank, whichever process that is: all ranks have values that may be sent.
        averages: whether the result is the sum divided by the number of ranks that take part. The script has not divided.
        new_outputs: whether nothing of the script knows the outputs, so that the engine may write into them.
        own_index: this rank's number, as the script saw it.
        driver: what a thread that waits for the call may drive, as of a handle.
        ended: called when a carrier has ended the call, by the thread that carries it out.

    Attributes:
        carrier: what carries it out; None if nothing has yet.
        completed: whether the carrier has carried it out, or never will because of the call's arguments.
        shown: done when the script may see the result.
    """

    number: int
    what: str
    line: str
    operation: Operation
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    reduction: ReductionArguments
    root: int
    splits: Sequence[int]
    allocate: Allocate | None
    described: Sequence[Tensor]
    origins: tuple[int, ...]
    own_index: int
    driver: Driver
    ended: Callable[[RepeatableCall], None]
    averages: bool = False
    new_outputs: bool = False
    of_first: bool = False
    carrier: Carrier | None = None
    completed: bool = False
    shown: Handle = field(init=False)
    _handle: Handle | None = None
    _error: BaseException | None = None
    _written: Sequence[tuple[Array, Array]] = ()

    def __post_init__(self) -> None:
        self.shown = Handle(driver=self.driver)

    def submit(self, carrier: Carrier) -> None:
        """Have ``carrier`` carry it out. Never waits for other ranks.

        Raises:
            ValueError, TypeError: the arguments have no meaning.
        """
        self.carrier, self._handle, self._error, self.completed = carrier, None, None, False
        written: list[tuple[Array, Array]] = []
        try:
            root = self._root_in(carrier)
        except RankLostError as error:
            self._error, self.completed = error, True
            return
        outputs = self.outputs
        if not self.new_outputs:
            sends = self.operation is Operation.BROADCAST and root == carrier.index
            outputs = [self._apart(each, written, filled=sends) for each in self.outputs]
        prescale = self.reduction.prescale / carrier.size if self.averages else self.reduction.prescale
        call = prepared_call(
            self.operation,
            PREFIX,
            None,
            self.described or self.inputs or outputs,
            self.reduction.op,
            prescale,
            self.reduction.postscale,
            root,
            self.splits,
            line=self.line,
        )
        self._written = written
        allocate = None if self.allocate is None else self._allocating(self.allocate, written)
        carrier.worker.count_from(call.request, self.number - 1)
        try:
            self._handle = submit(
                carrier.membership.number, call.request, self.inputs, outputs, allocate, end=self._end
            )
        except HorovodInternalError:
            pass  # the carrier has lost a rank: the call will be made again

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Called when the carrier has ended the call, just before its handle is done."""
        self.completed = error is None
        self.ended(self)
        return error

    def drive(self, seconds: float) -> bool:
        """Carry it out on this thread, or wait for it, at most ``seconds``. Returns whether it is completed."""
        handle = self._handle
        if handle is not None and not self.completed:
            handle.attempt()
            try:
                handle.wait(seconds)
            except Exception:
                return False  # await_completion() tells what to do
        return self.completed

    def await_completion(self, has_ended: Callable[[Exception], bool]) -> bool:
        """Wait until the carrier has carried it out, well or with an error of this call. The worker thread carries it out.

        It needs no limit: a runtime completes each handle, at the latest when it ends by the loss of a rank or by its time
        limit.

        Args:
            has_ended: whether the carrier has ended, asked after an error.

        Returns:
            False: the carrier has ended first.
        """
        if self._error is not None:
            return True
        if self._handle is None:
            return False
        self._handle.leave_to_worker()
        try:
            self._handle.wait()
        except Exception as error:
            if has_ended(error):
                return False
            self._error, self.completed = error, True
        return True

    def describe(self) -> str:
        """The operation and its number, for messages."""
        return f"{self.what} {numbered_name(PREFIX + UNNAMED, self.number)!r}"

    def hand_out(self) -> None:
        """Show the script the result."""
        if self._error is None:
            assert self._handle is not None
            for target, result in self._written:
                np.copyto(target, result)
            self.shown.result = self._handle.result
        self._finish(self._error)

    def fail(self, error: BaseException) -> None:
        """The job ends before it could be handed out."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self._handle, self._written = None, ()
        self.inputs = self.outputs = self.described = ()
        self.shown.complete(error)

    def _root_in(self, carrier: Carrier) -> int:
        """The root's rank in the carrier.

        Raises:
            RankLostError: it has none, or the call cannot be made among other ranks than those that the script saw.
        """
        if self.origins == carrier.origins:
            return self.root
        gone = [rank for rank, origin in enumerate(self.origins) if origin not in carrier.origins]
        lost = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
        if self.what not in _REPEATABLE:
            raise RankLostError(
                f"{self.what} at {self.line}: {lost} of {len(self.origins)} was lost, and this operation cannot be made again "
                "among the ranks that are left: its arguments are for each rank. After this error the group has "
                f"{carrier.size} ranks: make the call again with arguments for those.",
                ranks=gone,
                call_sites={self.own_index: self.line},
            )
        if self.root < 0 or self.of_first:
            return self.root
        origin = self.origins[self.root]
        if origin not in carrier.origins:
            raise RankLostError(
                f"{self.what} at {self.line}: its root, rank {self.root}, was lost.",
                ranks=[self.root],
                call_sites={self.own_index: self.line},
            )
        return carrier.origins.index(origin)

    @staticmethod
    def _apart(output: Tensor, written: list[tuple[Array, Array]], *, filled: bool) -> Tensor:
        """Memory of the call in place of an output."""
        memory = output.array.copy() if filled else np.empty_like(output.array)
        written.append((output.array, memory))
        return Tensor(memory, output.data_type, output.shape)

    @staticmethod
    def _allocating(allocate: Allocate, written: list[tuple[Array, Array]]) -> Allocate:
        def apart(index: int, rows: int) -> Array | Vectors:
            targets = allocate(index, rows)
            assert isinstance(targets, np.ndarray | list)  # host memory
            if isinstance(targets, np.ndarray):
                written.append((targets, np.empty_like(targets)))
                return written[-1][1]
            pieces = [np.empty_like(each) for each in targets]
            written.extend(zip(targets, pieces, strict=True))
            return pieces

        return apart
