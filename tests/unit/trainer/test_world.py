from __future__ import annotations

import os
import socket
import threading
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.functional import pad

from asyncrl.algorithms.diagnostics import RatioSums, TokenSums
from asyncrl.attention_rules import Scoring
from asyncrl.errors import DeadlineError, ProtocolError
from asyncrl.trainer import prefix_tree
from asyncrl.trainer import world as ranks
from asyncrl.trainer.attention import ForestAttention
from asyncrl.trainer.prefix_tree import plant_forest
from asyncrl.trainer.report import BatchSums, MetricSums
from asyncrl.trainer.world import World
from tests.fakes.ranks import DEADLINE, run_ranks


def test_a_rank_alone_exchanges_nothing(world: World) -> None:
    value = object()  # could not be encoded
    assert world.gather(value, object) == [value]


def test_words_are_heard_in_order_and_forgotten_after_the_next_meeting(world: World) -> None:
    first = ranks.RankZeroBroadcast(world)
    other = ranks.RankZeroBroadcast(world)
    other._store = first._store
    first._size = 2
    other._size = 2
    for number in range(5):
        first.send_word(word := b"%d" % number)
        assert other.next_word() == word and other.next_word() is None
        first.arrive_at_meeting()
        assert not first.all_arrived
        other.arrive_at_meeting()
        assert first.all_arrived and other.all_arrived
    assert first._store.num_keys() == 3  # two words and the count


def listening(world: World, folder: Path) -> list[str]:
    """Addresses of the sockets that rank 0's words opened."""
    before = listeners()
    words = ranks.RankZeroBroadcast(world)
    if world.rank == 0:
        words.send_word(b"word")
    while world.rank and words.next_word() is None:
        pass
    world.gather(0, int)
    return sorted(listeners() - before)


def listeners() -> set[str]:
    """Of this process: local addresses as the kernel writes them, with the port."""
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for line in chain(*tables)]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def test_words_are_sent_on_the_address_of_the_rendezvous_only(tmp_path: Path) -> None:
    (address,) = run_ranks(2, listening, tmp_path)
    assert address.startswith("0100007F:"), "127.0.0.1: a file is a rendezvous on one machine"


def meet_and_gather(world: World, folder: Path) -> list[int]:
    """The ranks, and the seconds that torch's store waits for a key."""
    seconds = dist.distributed_c10d._get_default_store().timeout.total_seconds()
    return [*world.gather(world.rank, int), round(seconds)]


def test_ranks_meet_in_a_directory_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b ü%20#?&'\"\n$x;\\"
    assert run_ranks(2, meet_and_gather, folder) == [0, 1, DEADLINE]


@pytest.mark.parametrize(
    ("rendezvous", "address"),
    [
        ("tcp://10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("tcp://fe80::1:29500", ("fe80::1", 29500)),
        ("/tcp:/x", None),
        ("/runs/%20/tcp://x:1", None),
    ],
)
def test_a_rendezvous_is_an_address_or_the_path_of_a_file(
    rendezvous: str, address: tuple[str, int] | None
) -> None:
    assert ranks._address(rendezvous) == address


@pytest.mark.parametrize("kind", ["file", "tcp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_other_ranks_has_a_name_and_a_limit(tmp_path: Path, kind: str, rank: int) -> None:
    with socket.socket() as silent, mock.patch.object(ranks, "DIAL_SECONDS", 0.05):
        silent.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        port = silent.getsockname()[1] if rank else 0  # 0: any that is free, for rank 0 to listen on
        rendezvous = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"{tmp_path}/%20"
        waits = ranks._Meeting(rank, 3, rendezvous, limit=0.1).waits()
        # A rank that cannot reach rank 0's store knows of no other.
        missing = "0" if kind == "tcp" and rank else {0: "1, 2", 1: "0, 2"}[rank]
        assert next(waits) == f"trainer ranks {missing} of 3 to join"
        late = rf"^waited 0.1 s at .*{missing} of 3 to join; see logs/trainer-{missing[0]}.log"
        with pytest.raises(DeadlineError, match=late):
            for _ in waits:
                pass


def joined_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, **patched: Any) -> list[str]:
    """What rank 0 of 2 does to join on cuda:1, in order, with fakes for what needs a GPU; calls of the main
    thread are marked."""
    calls: list[str] = []

    def call(name: str) -> None:
        main = "main: " if threading.current_thread() is threading.main_thread() else ""
        calls.append(main + name)

    fakes = {
        "init_process_group": lambda backend, **options: call(f"enter {backend} on {options['device_id']}"),
        "all_reduce": lambda tensor: call(f"all-reduce {tensor.numel()}"),
    }
    for name, fake in (fakes | patched).items():
        monkeypatch.setattr(dist, name, fake)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: call(f"use {device}"))
    monkeypatch.setattr(ranks, "_device", lambda name, rank: torch.device("cuda", 1))
    monkeypatch.setattr(ranks, "init_device_mesh", lambda kind, shape: call(f"mesh {kind}"))
    path = str(folder / "rendezvous")
    FileStore(path, 2).set("rank 1", "")
    ranks.join_ranks(0, 2, path, timeout_s=0.1)
    return calls


def test_a_gpus_communicator_is_made_where_ranks_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert joined_on_a_gpu(tmp_path, monkeypatch) == [
        "use cuda:1",
        "enter cpu:gloo,cuda:nccl on cuda:1",
        "all-reduce 1",
        "main: mesh cuda",
    ]


def test_gpus_that_do_not_connect_are_a_deadline_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    with pytest.raises(
        DeadlineError, match=r"did not connect the trainer's ranks within 0\.1 s; set NCCL_DEBUG"
    ):
        joined_on_a_gpu(tmp_path, monkeypatch, all_reduce=lambda tensor: over.wait())
    over.set()


def test_what_keeps_gpus_from_connecting_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str, **options: Any) -> None:
        raise RuntimeError("no NCCL")

    with pytest.raises(RuntimeError, match="no NCCL"):
        joined_on_a_gpu(tmp_path, monkeypatch, init_process_group=fail)


def tally(rank: int) -> MetricSums:
    metrics = MetricSums()
    metrics.add_ratio("a", 0.1, 3)
    metrics.add_total("n", rank)
    metrics.add_summary("x", [float("inf"), 1])
    metrics.sums += BatchSums(
        tokens_by_lag={rank: 2}, tokens=TokenSums(by_lag_bucket={"0": RatioSums(rho=0.1)})
    )
    return metrics


def refusal(world: World, value: Any, kind: type[Any]) -> str:
    try:
        world.gather(value, kind)
    except ProtocolError as error:
        return str(error)
    return ""


def shared(world: World) -> dict[str, Any]:
    """Attention of a forest in parts of five tokens, the last one of three and padding; 6 query heads, 2 KV
    heads: two ranks see both. And its gradients, of the sum of all ranks' losses."""
    laid = world.arranged(1, 3)
    assert laid.sequence is not None and laid.data_ranks == 1
    rows = [np.arange(11) % 7, np.array([0, 1, 2, 9, 9])]
    with mock.patch.object(prefix_tree, "LEAST_SHARED", 1):
        forest = ForestAttention(plant_forest(rows, share_prefixes=True))
    size = len(forest.forest.ids)
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    whole = [draw(heads, size, 4) for heads in (6, 2, 2)]
    weight = draw(size, 6, 4)
    mine = slice(5 * world.rank, 5 * world.rank + 5)
    parts = [pad(x, (0, 0, 0, 15 - size))[:, mine] for x in whole]
    inputs = [x.clone().requires_grad_() for x in (*whole, *parts)]
    attend = partial(forest.kernel.attend, scoring=Scoring(0.4))
    expected = attend(*inputs[:3])
    attention_output = laid.sequence.attend(*inputs[3:], size, attend)  # type: ignore[call-arg]
    (expected * weight).sum().backward()
    (attention_output * pad(weight, (0, 0, 0, 0, 0, 15 - size))[mine]).sum().backward()
    gaps = [(attention_output[: size - mine.start] - expected[mine]).abs().max()]
    for part, all_of_it in zip(inputs[3:], inputs[:3], strict=True):
        assert part.grad is not None and all_of_it.grad is not None
        gaps.append((part.grad - pad(all_of_it.grad, (0, 0, 0, 15 - size))[:, mine]).abs().max())
    laid.check_shared("same", str)
    with pytest.raises(ProtocolError, match=r"different micro-batches \(2 of 3 ranks, the first is rank 1\)"):
        laid.check_shared(world.rank, int)
    worst = max(world.gather(max(map(float, gaps)), float))
    return {"tokens": size, "gap": worst, "one of three": laid.gather_data(world.rank, int)}


def exchange(world: World, folder: Path) -> dict[str, Any]:
    """Values of other lengths on every rank, in parts of 5 bytes."""
    ranks.PART_BYTES = 5
    found: dict[str, Any] = {
        "lists": world.gather([f"{world.rank}"] * world.rank, list[str]),
        # Encoded: 1 + 9n bytes, so one part, two full ones, and more with a rest.
        "lengths": world.gather("abcdefghi" * world.rank, str),
        "bytes": world.gather(bytes(range(100 * world.rank)), bytes),
        "tallies": world.gather(tally(world.rank), MetricSums),
        "kind": refusal(world, "three" if world.rank else 3, int),
    }
    found |= shared(world)
    ranks.MAX_BYTES = 8
    found["bound"] = refusal(world, "x" * world.rank * 4, str)  # only the last rank is over it
    found["after"] = world.gather(world.rank, int)
    return found


def test_values_of_all_ranks_come_in_rank_order_in_parts(tmp_path: Path) -> None:
    rank_results = run_ranks(3, exchange, tmp_path)
    assert rank_results["lists"] == [[], ["1"], ["2", "2"]]
    assert rank_results["lengths"] == ["", "abcdefghi", "abcdefghiabcdefghi"]
    assert rank_results["bytes"] == [bytes(range(100 * rank)) for rank in range(3)]
    assert rank_results["tallies"] == [tally(rank) for rank in range(3)]
    assert "a trainer rank sent something other than <class 'int'>" in rank_results["kind"]
    assert "[1, 5, 9] bytes, but the limit is 8" in rank_results["bound"]
    assert rank_results["after"] == [0, 1, 2]
    assert rank_results["tokens"] == 13 and rank_results["gap"] < 1e-14
    assert rank_results["one of three"] == [0]
