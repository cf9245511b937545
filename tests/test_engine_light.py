"""What programs compute of positions before they come: to the end of a table, in any order, with little room, the modules' scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gptj import modeling_gptj

from colrow.comm.group import Group
from colrow.engine import light
from colrow.engine.forward import Forward
from colrow.engine.slots import Slot
from tests.test_engine_program import prepared, split, whole

END = 24
sinusoidal = modeling_gptj.create_sinusoidal_positions


def sharp(family: str) -> Any:
    """The model with attention that looks at few positions, so that where these are matters."""
    model = whole(family)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(8 if "q_proj" in name or "query_key_value" in name else 1)
    return model


def differences(model: Any, group: Group) -> list[float]:
    """Two rows a few positions apart, to position END or where GPT-J's table of sines ends; then two that begin again."""
    decoder, forward = prepared(model, group), Forward(model)
    assert decoder.program is not None, decoder.why
    out = []
    for lengths in ((3, 9), (2, 5)):
        pasts = [forward(torch.tensor([list(range(at, 2 * at))]), None, None)[1] for at in lengths]
        slots = [Slot(past) for past in pasts]
        for step in range(END - max(lengths)):
            tokens = [(5 * step + at) % model.config.vocab_size for at in lengths]
            mine = decoder.program.run(tokens, slots)
            for row, token in enumerate(tokens):
                theirs, pasts[row] = forward(torch.tensor([[token]]), None, pasts[row])
                out.append(float((mine[row] - theirs[0].float()).abs().max()))
    return out


@pytest.mark.parametrize("kept", [light.KEPT, 1])
@pytest.mark.parametrize("family", ["llama", "gptj", "bloom"])
def test_positions_that_are_computed_ahead(family: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "KEPT", kept)
    monkeypatch.setattr(modeling_gptj, "create_sinusoidal_positions", lambda count, dim: sinusoidal(END, dim))
    for found in split(sharp(family), 2, differences):
        assert max(found) < 1e-4


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "KEPT", 1500)  # sines and cosines of 8 numbers each

    def kept(model: Any, group: Group) -> int:
        decoder = prepared(model, group)
        program = decoder.program
        assert program is not None
        slot = Slot(Forward(model)(torch.tensor([[5]]), None, None)[1])
        for _ in range(END):
            program.run([7], [slot])
        return len(program._light._known)

    assert split(whole("llama"), 2, kept) == [1500 // 64] * 2
