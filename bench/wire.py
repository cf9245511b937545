"""Are the bytes that gloo's transport counts those that a network carries? Two ranks in two network namespaces and a virtual cable.

    sudo python bench/wire.py          (needs root, `ip`, `unshare` and `nsenter`)

Prints, per payload, what rank 0's transport counted and what its network interface counted (sent and received, all headers of Ethernet, IP
and TCP included). Exit code 1 where they differ by more than 5 %. The namespaces end with the processes: nothing is left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from colrow.comm.gloo import GlooTransport
from colrow.comm.group import Call

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE, PORT, TIMES = "cable", 29_577, 50
PAYLOADS = (256 << 10, 1 << 20, 8 << 20)  # bytes; far smaller ones are mostly headers


def interface_bytes() -> int:
    """Sent and received by this namespace's end of the cable."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == CABLE:
            numbers = figures.split()
            return int(numbers[0]) + int(numbers[8])
    raise RuntimeError(f"no interface {CABLE}")


def rank_main(rank: int) -> None:
    print("ready", flush=True)
    sys.stdin.readline()  # until the cable is there
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE
    store = dist.TCPStore(ADDRESSES[0], PORT, 2, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    transport, right = GlooTransport((0, 1), rank), True
    for nbytes in PAYLOADS:
        x = torch.zeros(nbytes // 4)
        transport.gather_objects(None, Call("barrier", "start"))
        before, moved = interface_bytes(), 0
        for _ in range(TIMES):
            moved += transport.all_reduce(x, "sum", Call("all_reduce", "wire", "float32", x.numel()))
        transport.gather_objects(None, Call("barrier", "end"))
        seen = interface_bytes() - before
        right &= abs(seen - moved) <= 0.05 * moved
        if rank == 0:
            print(
                f"{TIMES} all-reduces of {nbytes} bytes: counted {moved}, interface {seen} ({(seen / moved - 1) * 100:+.2f} %)", flush=True
            )
    dist.destroy_process_group()
    sys.exit(0 if right else 1)


def main() -> None:
    command = ["unshare", "-n", sys.executable, __file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "."}
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        first, second = (str(process.pid) for process in ranks)
        inside = ["nsenter", "-t", first, "-n", "ip", "link", "add", CABLE, "mtu", "9000", "type", "veth", "peer", "name", CABLE]
        subprocess.run([*inside, "mtu", "9000", "netns", second], check=True)
        for process, address in zip(ranks, ADDRESSES, strict=True):
            for words in (["addr", "add", f"{address}/24", "dev", CABLE], ["link", "set", CABLE, "up"], ["link", "set", "lo", "up"]):
                subprocess.run(["nsenter", "-t", str(process.pid), "-n", "ip", *words], check=True)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert ranks[0].stdout is not None
        print(ranks[0].stdout.read(), end="")
        codes = [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    sys.exit(max(codes))


if __name__ == "__main__":
    rank_main(int(sys.argv[1])) if len(sys.argv) > 1 else main()
