"""What one rank can say about its split model: its answers compared with the whole model's, digests of its bits, its counted collectives.

Runs on every rank alike, in a thread of the gate or in a process of its own. `judge` looks at the evidence of all ranks together: copies
must be bit-equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..comm.group import Group
from ..parallel.head import sharded_logits
from ..parallel.inline_loss import computes_own
from ..parallel.state import state_of
from ..planning.plan import Plan
from . import compare
from .compare import Comparison, Item
from .counts import count_items, counted, predicted
from .exercise import Answers, ask, optimizers
from .precision import computing_in, tolerance
from .reference import Reference, digest

AFTER = "copies after both steps"
OF_THE_LOSS = ("loss.max", "loss.sum")

Copies = dict[tuple[str, str, int], str]
"""(kind, parameter, start of the stretch along its cut dim or 0) -> digest: of everything that other ranks hold too."""


@dataclass(frozen=True)
class Evidence:
    comparison: Comparison
    copies: Copies


def examine(model: nn.Module, group: Group, plan: Plan, reference: Reference) -> Evidence:
    """Asks the split model on this rank what the whole one was asked, and compares. A collective: all ranks must call it. Changes the
    parameters where training was asked for."""
    items = list(_weights(model, group.rank, reference))
    counters = group.counters
    counters.reset()

    def phase(name: str) -> None:
        counters.phase = name

    with computing_in(reference.dtype):
        answers = ask(model, reference.asked, reference.answers.tokens, phase, lambda: sharded_logits(model))
    found = counted(group)
    items += _answers(reference, answers)
    copies: Copies = {}
    if reference.asked.train:
        items += _gradients(model, plan, group.rank, reference)
        copies |= _copies("copies of gradients", {n: p.grad for n, p in model.named_parameters()}, plan, group.rank)
        items += _steps(model, plan, group.rank, reference)
        copies |= _copies(AFTER, dict(model.named_parameters()), plan, group.rank)
    asked = replace(reference.asked, steps=len(answers.tokens))  # one step only where the model has no cache
    state = state_of(model)
    cut = state.sequence.cut if state.sequence is not None else None
    expected = predicted(state.plan, asked, group, reference.dtype.itemsize, cut, reference.answers.rows)
    for site in list(expected):
        parameter = site[2].removesuffix(".grad").removesuffix(".copies")
        if parameter in plan.tensors and parameter not in reference.gradients:
            del expected[site]  # its gradient, if it had one, would be a part
        elif site[2] in OF_THE_LOSS and computes_own(model) and site in found:
            calls = expected[site][0] * reference.answers.losses
            expected[site] = found[site] if found[site][0] == calls else expected[site]  # of how many positions is the model's own business
    items += count_items(expected, found, group)
    return Evidence(Comparison(tuple(items)), copies)


def judge(evidence: Sequence[Evidence]) -> Comparison:
    """Everything that all ranks found, and whether what several ranks hold has the same bits on all of them."""
    items = list(compare.merge(e.comparison for e in evidence).items)
    holders: dict[tuple[str, str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, one in enumerate(evidence):
        for key, bits in one.copies.items():
            holders[key][bits].append(rank)
    for kind in dict.fromkeys(kind for kind, _, _ in holders):
        mine = {key: sides for key, sides in holders.items() if key[0] == kind}
        torn = {key: sides for key, sides in mine.items() if len(sides) > 1}
        shared = sum(1 for sides in mine.values() if sum(map(len, sides.values())) > 1)
        text = f"{shared} tensors held by several ranks"
        if torn:
            (_, name, start), sides = next(iter(torn.items()))
            text = f"{name} from {start} differs between ranks {' and '.join(str(r) for r in sides.values())}"
        items.append(Item(kind, "bits", float(len(torn)), 0.0, detail=text))
    return Comparison(tuple(items))


def _weights(model: nn.Module, rank: int, reference: Reference) -> Iterator[Item]:
    wrong = [name for name, p in model.named_parameters() if digest(p) != reference.weights[name][rank]]
    detail = f"{wrong[0]} is not the whole model's" if wrong else f"{len(reference.weights)} parameters, bit for bit"
    yield Item("weights", "bits", float(len(wrong)), 0.0, detail=detail)


def _answers(reference: Reference, answers: Answers) -> Iterator[Item]:
    expected, dtype = reference.answers, reference.dtype

    def item(kind: str, name: str, whole: torch.Tensor, split: torch.Tensor) -> Item:
        error = reference.own_error(kind, name)
        return compare.item(kind, name, whole, split, tolerance(dtype, error), error)

    for name, whole in expected.outputs.items():
        kind = "logits" if name == "logits" else "outputs"
        yield item(kind, name, whole, answers.outputs.get(name, whole.new_empty(0)))
    if expected.loss is not None and answers.loss is not None:
        yield item("loss", "loss", expected.loss, answers.loss)
    if expected.tokens:
        cached = item("decoding", "logits", expected.decoded, answers.decoded)
        yield cached
        yield compare.tokens(expected.tokens, answers.tokens, expected.decoded, cached.tolerance * cached.scale)


def _gradients(model: nn.Module, plan: Plan, rank: int, reference: Reference) -> Iterator[Item]:
    """This rank's slices against the same slices of the whole model's gradients."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None and not parameter.numel():  # of an entry that lies on other ranks
            continue
        if (parameter.grad is None) != (name not in reference.gradients):
            detail = "is missing" if parameter.grad is None else "is there, the whole model has none"
            yield Item("gradients", name, float("inf"), 0.0, detail=detail)
        elif parameter.grad is not None:
            error = reference.own_error("gradients", name)
            expected = plan.tensor(name).partition.split(reference.gradients[name], rank)
            allowed = tolerance(reference.dtype, error)
            yield compare.item("gradients", name, expected, parameter.grad, allowed, error, reference.scales[name])


def _steps(model: nn.Module, plan: Plan, rank: int, reference: Reference) -> Iterator[Item]:
    """The parameters after one SGD step and then one AdamW step, with the same gradients: by how much each step changed them.

    SGD and AdamW work element by element, so the whole model's step, cut, is the step on the cut of the whole model's weights and
    gradients; that is how it is computed here. The weights are known to have the whole model's bits.
    """
    assert reference.steps is not None
    for name, parameter in model.named_parameters():
        if parameter.grad is None or name not in reference.gradients:
            continue
        expected = nn.Parameter(parameter.detach().clone())
        expected.grad = plan.tensor(name).partition.split(reference.gradients[name], rank).to(parameter.device).clone()
        if expected.grad.shape != expected.shape:
            continue  # told already
        size = compare.largest(parameter)
        steps = zip(optimizers(parameter, reference.steps), optimizers(expected, reference.steps), strict=True)
        for (kind, mine, gain, reach), (_, whole, _, _) in steps:
            before, whole_before = parameter.detach().clone(), expected.detach().clone()
            mine.step()
            whole.step()
            change, whole_change = parameter.detach() - before, expected.detach() - whole_before
            scale = max(compare.largest(whole_change), reach(reference.scales[name]))
            error = reference.own_error("gradients", name)
            rounding = torch.finfo(reference.dtype).eps * size  # of the parameter itself, to which the change is added
            own = (gain * (error or 0.0) * reference.scales[name] + rounding) / scale
            floor = gain * tolerance(reference.dtype, error) * reference.scales[name] / scale
            yield compare.item(kind, name, whole_change, change, max(floor, tolerance(reference.dtype, own)), own, scale)


def _copies(kind: str, tensors: dict[str, torch.Tensor | None], plan: Plan, rank: int) -> Copies:
    found: Copies = {}
    for name, value in tensors.items():
        if value is None:
            continue
        cut = plan.tensor(name).partition
        if cut.dim is None:
            found[kind, name, 0] = digest(value)
            continue
        for segment in cut.shared():
            at = cut.local_offset(rank, segment.start)
            if rank in segment.ranks and at is not None:
                found[kind, name, segment.start] = digest(value.narrow(cut.dim, at, segment.stop - segment.start))
    return found
