"""A part that cannot fit is refused before a weight is read, in one line on every rank."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import room
from colrow.planning.derive import derive
from tests import tiny

CPU = torch.device("cpu")


def limited(monkeypatch: pytest.MonkeyPatch, *rooms: room.Room) -> None:
    monkeypatch.setattr(room, "rooms", lambda device: iter(rooms))


def test_a_part_that_fits_passes_and_one_byte_less_is_refused(monkeypatch):
    plan = derive(tiny.config("llama"), 1)
    size = sum(p.numel() for p in tiny.whole(tiny.config("llama")).parameters()) * 4
    limited(monkeypatch, room.Room("this test", ("a",), size))
    room.check(plan, torch.float32, single())
    limited(monkeypatch, room.Room("this test", ("a",), size - 1))
    with pytest.raises(UserError, match="rank 0's parameters take .* GB, and this test leaves .*--tp 2") as refused:
        room.check(plan, torch.float32, single())
    assert "\n" not in str(refused.value)
    room.check(plan, torch.bfloat16, single())


def test_ranks_that_share_a_memory_count_together_and_every_rank_is_told(monkeypatch):
    plan = derive(tiny.config("llama"), 2)
    size = sum(p.numel() for p in tiny.whole(tiny.config("llama")).parameters()) * 8
    limited(monkeypatch, room.Room("the host", ("h",), int(0.9 * size)))

    def rank(group: Group) -> str:
        with pytest.raises(UserError) as refused:
            room.check(plan, torch.float64, group)
        return str(refused.value)

    first, second = run_threads(rank, 2)
    assert first == second
    assert "the 2 ranks' parameters" in first


def test_limits_of_this_process_are_seen():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert not any("RLIMIT_DATA" in r.what for r in room.rooms(CPU)) or before[0] != resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, before[1]))
    try:
        (found,) = [r for r in room.rooms(CPU) if "RLIMIT_DATA" in r.what]
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert (1 << 40) - (8 << 30) < found.free < 1 << 40


def test_the_share_of_a_rank_is_what_all_can_take(monkeypatch):
    limited(monkeypatch, room.Room("the host", ("h",), 1000), room.Room("its own limit", ("h", "RLIMIT_DATA", "1"), 600, own=True))
    assert run_threads(room.share, 1) == [600]
    assert run_threads(room.share, 4) == [250] * 4


def test_ranks_share_their_control_group(monkeypatch):
    monkeypatch.setattr(room, "cgroups", lambda listed, root: iter([(Path("/all"), 4000, 1000)]))
    assert run_threads(room.share, 1) == [3000]
    assert run_threads(room.share, 3) == [1000] * 3


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_of_both_versions(version: int, tmp_path: Path):
    listed, base = tmp_path / "cgroup", tmp_path / "memory" if version == 1 else tmp_path
    listed.write_text("4:cpu,memory:/a/b\n" if version == 1 else "0::/a/b\n")
    most, used, file = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )  # fmt: skip
    for folder, limit in ((base / "a" / "b", "9223372036854771712" if version == 1 else "max"), (base / "a", "8000")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / most).write_text(f"{limit}\n")
        (folder / used).write_text("5000\n")
        (folder / "memory.stat").write_text(f"anon 4000\n{file} 1000\n")
    assert list(room.cgroups(listed, tmp_path)) == [(base / "a", 8000, 4000)]
    assert list(room.cgroups(tmp_path / "none", tmp_path)) == []
