"""Decoder: the next scores of sequences that each get one token, by a program where the model has one that was compared with its modules.

    decoder = Decoder(model, group)
    decoder.prepare()                       # a collective; afterwards `decoder.program` or the reason in `decoder.why`

A program holds the weights of the moment it was made in. `prepare` before each generation makes another where the model has changed since:
an optimizer's step, other weights, an adapter added, merged or switched off.

The comparison: a few tokens go through the modules, then a few more both ways. All ranks use the program, or none does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import native
from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..errors import RankError
from . import compiled, recorded, tail
from .continuing import continues
from .forward import Forward
from .program import Program
from .slots import Slot
from .state import state
from .stopping import context_limit
from .tape import Attended, Cached, NotRecorded, Tape
from .translate import Translate

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""By dtype, the largest difference of any score, of the largest score. A program adds in another order than the modules, and in 16 bits it
rounds less often. A router's choice between scores that differ by less may turn out either way, so the program is told how the modules
chose, and each such choice must be within the tolerance."""
INT8_TOLERANCE = 1e-3  # at least, where weights are int8: what they are multiplied by is rounded to 16 bits of a group's largest
BEFORE, BESIDE = 5, 3  # tokens that the modules alone see; tokens that both see
FAR = 1024  # positions over which it is seen what a model adds to scores

T = TypeVar("T")


class Decoder:
    """`program`: None before `prepare`, and where the modules run; then `why` says the reason."""

    def __init__(self, model: Any, group: Group, wanted: bool = True) -> None:
        self.program: Program | None = None
        self.why = "" if wanted else "it was not wanted"
        self.difference = 0.0
        self._model, self._group, self._wanted = model, group, wanted
        self._forward = Forward(model)
        self._seen: Any = None
        self._continues: bool | None = None

    @property
    def steps(self) -> str:
        """How steps are made, for the user."""
        return f"decoding: {len(self.program.code)} instructions in C" if self.program else f"decoding: the model's modules ({self.why})"

    @property
    def continues(self) -> bool:
        """Whether several tokens may go on from a cache (continuing.py). Asked after `prepare`; a collective at first. What a program is
        made of leaves nothing to look for."""
        if self._continues is None:
            limit = context_limit(self._forward.model.config)
            plain = self.program is not None and not self.program.compiled.rewritten
            self._continues = plain or continues(self._forward, self._group, limit)
        return self._continues

    def forget(self) -> None:
        """Gives up the program, and with it the weights that it has; the next `prepare` makes another."""
        self.program, self._seen = None, None

    def prepare(self) -> None:
        """Makes the program and compares it, unless there is one for this state of the model. A collective: parts change alike."""
        if not self._wanted or self._state() == self._seen:
            return
        self.program, self.why, self.difference = None, "", 0.0
        phase, self._group.counters.phase = self._group.counters.phase, "prepare"
        try:
            self._prepare()
        finally:
            self._group.counters.phase = phase
        self._seen = self._state()  # after steps were made: the first may add an attribute

    def _state(self) -> list[Any]:
        return state(self._model, () if self.program is None else self.program.compiled.rewritten)

    def _prepare(self) -> None:
        model, group = self._model, self._group
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if group.device.type != "cpu" or not dtypes <= TOLERANCE.keys():
            self.why = f"not on a CPU in float32, bfloat16 or float16, but {' and '.join(sorted(map(str, dtypes)))} on {group.device.type}"
            return
        vocab = model.config.get_text_config().vocab_size
        tokens = [(7 * at + 3) % vocab for at in range(BEFORE + BESIDE)]
        tail.find(model, group)
        if model.config.is_encoder_decoder:
            self._forward = Translate(model, [tokens[::-1]], group.device)  # anew: it keeps what the encoder made
        own = recorded.has_own_attention(model) and not model.config.is_encoder_decoder
        for plain in (False, True) if own else (True,):
            found = self._made(tokens, plain)
            if found is not None and self._compared(found, tokens):
                self.program = found
                return

    def _compared(self, found: Program, tokens: list[int]) -> bool:
        """Whether the program's scores are the modules' on every rank."""
        self.difference = 0.0
        past = self._past(tokens[:BEFORE])
        slot = Slot(past)
        for token in tokens[BEFORE:]:
            with _Choices() as choices:
                theirs, past = self._forward(torch.tensor([[token]]), None, past)
            mine, given_away = found.run_as(choices.places, token, slot)
            largest = float(theirs.float().abs().max()) if theirs.numel() else 0.0
            difference = float((mine - theirs.float()).abs().max()) / (largest or 1.0) if theirs.numel() else 0.0
            difference = max(difference, given_away) if difference == difference else difference
            self.difference = max(self.difference, difference) if difference == difference else float("inf")
        close = self.difference <= max(TOLERANCE[found.dtype], INT8_TOLERANCE if found.int8 else 0)
        return self._all_agree("" if close else f"its program differs by {self.difference:.1e} of the largest score")

    def _made(self, tokens: list[int], plain: bool) -> Program | None:
        """The same on every rank whether there is one; else `why` says the reason. Of a model that takes no positions, it is not known how
        they come in: so its step must be the same one position later."""

        def last_place() -> int:
            limit = context_limit(self._model.config)
            if limit is None:
                raise NotRecorded("its code looks at the position")
            return limit - 1

        def program() -> Program:
            if not all(compiled.same(made[0], other) for other in made[1:]):
                raise NotRecorded("its code looks at the position")
            dtype = next(entry.k.dtype for entry in tapes[0].entries if isinstance(entry, Cached))
            return Program(made[0], self._group, dtype, torch.get_num_threads())

        try:
            tapes = [self._tape(tokens, length, plain) for length in (BEFORE, BEFORE + 1)[: 1 if self._forward.takes_positions else 2]]
            if any(isinstance(entry, Attended) and entry.bias is not None for entry in tapes[0].entries):
                tapes = [self._tape(tokens, BEFORE, plain, far) for far in (FAR, FAR + 1)]
            made = self._on_all(lambda: [compiled.compile(tape) for tape in tapes])
            if made[0].compares:  # what is the same at both ends is the same between, wherever its code asks for a bound
                last = self._tape(tokens, BEFORE, plain, self._on_all(last_place))
                made += self._on_all(lambda: [compiled.compile(last)])
            return self._on_all(program)
        except NotRecorded:
            return None

    def _tape(self, tokens: list[int], length: int, plain: bool, far: int | None = None) -> Tape:
        """The step after `length` tokens; of an encoder-decoder as after `far`."""

        def step() -> Tape:
            past = self._past(tokens[:length])
            return recorded.record(self._model, self._group, self._forward, past, tokens[length], plain, far)

        return self._on_all(step)

    def _on_all(self, make: Callable[[], T]) -> T:
        """What `make` gives. NotRecorded on all ranks where one has a reason, which is in `why`: it must not leave the others alone in the
        sums of what comes next."""
        found, why = list[T](), ""
        try:
            found.append(make())
        except (NotRecorded, native.NativeUnavailable) as error:
            why = str(error)
        except RankError:
            raise
        except Exception as error:  # a model's code may fail where it meets what it has never met before
            why = f"recording a step failed: {type(error).__name__}: {error}"
        if not self._all_agree(why):
            raise NotRecorded(self.why)
        return found[0]

    def _past(self, tokens: list[int]) -> Any:
        return self._forward(torch.tensor([tokens]), None, None)[1]

    def _all_agree(self, why: str) -> bool:
        """Whether no rank has a reason against it."""
        try:
            found = gather_objects(why, self._group, "engine.program")
        except RankError as error:  # the others are in the middle of what failed here
            raise (RankError(f"rank {self._group.rank}: {why} ({error})") if why else error) from None
        self.why = next((text if set(found) == {text} else f"on rank {rank} {text}" for rank, text in enumerate(found) if text), "")
        return not self.why


class _Choices(TorchDispatchMode):
    """`places`: what the routers of a model chose while it ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.places.append(result[1])
        return result
