"""The ranks of one trainer: process group, device and mesh. A single rank has the same, and exchanges
nothing.

Some ranks may share each sequence (sequence parallelism over heads: DeepSpeed Ulysses, arXiv 2309.14509):

    T/S tokens, all heads ──► T tokens, 1/S of the heads ── attention ──► T/S tokens, all heads

Everything but attention is computed token by token. The results for selected tokens are gathered, so all S
ranks have the same loss. The gradient of an exchange is its adjoint, so the gradients of all S ranks add up
to the gradient of the sum of their equal losses.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import gcd
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.autograd import Function
from torch.distributed import DistNetworkError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from asyncrl.errors import ConfigError, DeadlineError, ProtocolError, fulfil

T = TypeVar("T")
MAX_BYTES = 4 << 30  # limit of a rank's value; a whole batch takes about 40 bytes per model token
PART_BYTES = 64 << 20  # bytes of a value that travel at once
GRADIENT_BYTES = 256 << 20  # bytes of gradients in one all-reduce of replicas
TCP = "tcp://"  # prefix of a rendezvous with host and port; otherwise it is the path of a file
MEET_POLL = 0.05  # seconds between two checks for the other ranks
DIAL_SECONDS = 2.0  # rank 0's store must answer in this time; ranks dial again until their limit
OWN_DIAL_SECONDS = 60.0  # rank 0's limit to reach its own new store, on a busy machine


@dataclass(frozen=True)
class World:
    """This process among `size` ranks. Every method is a collective: all ranks call it, or none.

    `mesh`: the ranks over which this rank's copy of the weights is sharded, [ranks of a replica]. `sequence`:
    the ranks that share this rank's micro-batches; None: no sharing. `group`: the process group of all
    messages; None: the default group. `rendezvous`: where the ranks met. `replica_group`: this rank, and the
    ranks that hold the same shards in other copies of the weights; None: there is one copy.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    sequence: SequenceRanks | None = None
    group: dist.ProcessGroup | None = None
    rendezvous: str = ""
    replica_group: dist.ProcessGroup | None = None

    @property
    def data_ranks(self) -> int:
        """Return how many micro-batches are computed at once."""
        return self.size // (self.sequence.count if self.sequence else 1)

    def arranged(self, replicas: int, sequence: int, timeout_s: float = 0.0) -> World:
        """Return the same ranks with weights sharded over each of `replicas` equal parts (HSDP), and with
        micro-batches that `sequence` neighbours share. Both divide the ranks. `timeout_s`: of the parts'
        collectives; 0: torch's default.

        FSDP2 is not told of the replicas. With a mesh of two dimensions it would all-reduce the gradients of
        every micro-batch, unless told before the last backward of a step, and the last micro-batch is not
        known in advance. So FSDP2 shards within a replica, and `average_gradients` does the rest.
        """
        device_type = self.device.type
        mesh = self.mesh
        sequence_ranks = None
        process_groups = list[dist.ProcessGroup]()
        replica_group = None
        if replicas > 1:
            replica_shard_mesh = init_device_mesh(
                device_type, (replicas, self.size // replicas), mesh_dim_names=("replicate", "shard")
            )
            process_groups += replica_shard_mesh.get_all_groups()
            mesh = replica_shard_mesh["shard"]
            replica_group = replica_shard_mesh.get_group("replicate")

        if sequence > 1:
            group = init_device_mesh(device_type, (self.size // sequence, sequence)).get_group(1)
            sequence_ranks = SequenceRanks(group, self.rank % sequence, sequence)
            process_groups.append(group)

        if timeout_s:  # a mesh gives its groups torch's default timeout
            for process_group in process_groups:
                _set_pg_timeout(timedelta(seconds=timeout_s), process_group)

        return replace(self, mesh=mesh, sequence=sequence_ranks, replica_group=replica_group)

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average over the replicas the gradients that FSDP2 has averaged within each replica, once a step.
        Gradients lie in `.grad` only, so that `zero_grad` drops the gradients of a batch that is left out."""
        if self.replica_group is None:
            return
        gradient_shards = [
            cast(DTensor, parameter.grad).to_local() for parameter in parameters if parameter.grad is not None
        ]

        for bucket in _in_buckets(gradient_shards, GRADIENT_BYTES):
            flat_shards = [shard.flatten() for shard in bucket]
            # Shards may be offloaded.
            joined_shards = flat_shards[0] if len(flat_shards) == 1 else torch.cat(flat_shards)
            joined_shards = joined_shards.to(self.device)
            dist.all_reduce(joined_shards, group=self.replica_group)
            joined_shards /= self.replica_group.size()
            averages = joined_shards.split([shard.numel() for shard in bucket])
            for shard, average in zip(bucket, averages, strict=True):
                shard.copy_(average.view_as(shard))

    def with_own_group(self, timeout_s: float) -> World:
        """Return the same ranks with a separate group on the CPU, for a thread beside training."""
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    def use_device(self) -> None:
        """Make this thread use the rank's GPU; a new thread would use GPU 0, and hold memory there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def collect_on_rank_zero(self, shard: DTensor) -> Tensor:
        """Return a whole tensor, sharded along its first dimension, on rank 0 and the CPU; a local shard on
        other ranks. The first replica's ranks send their shards."""
        local_shard = shard.to_local().cpu()
        shard_count = self.mesh.shape[-1]
        rows_per_shard = -(-shard.shape[0] // shard_count)
        if shard_count == 1:
            return local_shard

        if self.rank:
            if local_shard.numel() and self.rank < shard_count:
                dist.send(local_shard, 0, group=self.group)
            return local_shard

        whole_tensor = local_shard.new_empty(shard.shape)
        whole_tensor[:rows_per_shard] = local_shard
        for first_row in range(rows_per_shard, shard.shape[0], rows_per_shard):
            dist.recv(
                whole_tensor[first_row : first_row + rows_per_shard],
                first_row // rows_per_shard,
                group=self.group,
            )

        return whole_tensor

    def gather(self, value: T, value_type: type[T]) -> list[T]:
        """Return the values of all ranks, in rank order, on all ranks; a rank alone gets its own object back.

        Nothing is unpickled: the values travel as msgpack in parts, their lengths ahead of them. Raises
        ProtocolError for a value that is no `value_type` and, on all ranks, when a value is over MAX_BYTES.
        """
        if self.size == 1:
            return [value]

        encoded_values = self._gather_bytes(msgspec.msgpack.encode(value))
        with ProtocolError.instead_of(
            msgspec.DecodeError, text=f"a trainer rank sent something other than {value_type}"
        ):
            return [
                msgspec.msgpack.decode(encoded_value, type=value_type) for encoded_value in encoded_values
            ]

    def gather_data(self, value: T, value_type: type[T]) -> list[T]:
        """Gather as `gather` does, but count ranks that share a micro-batch once."""
        return self.gather(value, value_type)[:: self.size // self.data_ranks]

    def check_shared(self, value: T, value_type: type[T]) -> None:
        """Raise ProtocolError on all ranks, unless ranks that share micro-batches have the same value."""
        if self.sequence is None:
            return
        values = self.gather(value, value_type)
        sharing_ranks = self.sequence.count
        differing_ranks = [
            rank
            for rank, rank_value in enumerate(values)
            if rank_value != values[rank - rank % sharing_ranks]
        ]

        if differing_ranks:
            raise ProtocolError(
                "trainer ranks that share a micro-batch received different micro-batches "
                f"({len(differing_ranks)} of {self.size} ranks, the first is rank {differing_ranks[0]})"
            )

    def _gather_bytes(self, own_bytes: bytes) -> list[bytearray]:
        """Return the bytes of all ranks."""
        lengths = [int(length) for length in self._gather_tensors(torch.tensor([len(own_bytes)]))]
        longest = max(lengths)
        if longest > MAX_BYTES:
            raise ProtocolError(
                f"trainer ranks exchange values of {lengths} bytes, but the limit is {MAX_BYTES}: "
                "the recipe compares too much of the batch across ranks; use a smaller batch or more ranks"
            )

        gathered = [bytearray() for _ in lengths]
        for start in range(0, longest, PART_BYTES):
            end = min(start + PART_BYTES, longest)
            own_part = bytearray(own_bytes[start:end].ljust(end - start, b"\0"))
            for rank_bytes, rank_part in zip(
                gathered, self._gather_tensors(torch.frombuffer(own_part, dtype=torch.uint8)), strict=True
            ):
                rank_bytes += rank_part.numpy().tobytes()

        for rank_bytes, length in zip(gathered, lengths, strict=True):
            del rank_bytes[length:]

        return gathered

    def _gather_tensors(self, own_tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, all of the same shape, on the CPU."""
        parts = [torch.empty_like(own_tensor) for _ in range(self.size)]
        dist.all_gather(parts, own_tensor, group=self.group)
        return parts


def _in_buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists of at most `limit` bytes; a larger tensor is alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(tensor_in_bucket.nbytes for tensor_in_bucket in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)

    if bucket:
        yield bucket


class RankZeroBroadcast:
    """Broadcast and barrier over a TCPStore: unlike collectives, waiting has no timeout. Like collectives,
    the store asks for no key; it listens on the address of the rendezvous only. DistNetworkError: rank 0 is
    gone."""

    def __init__(self, world: World) -> None:
        self._size = world.size
        self._word_count = 0
        self._meetings = 0
        self._store: Any = HashStore()

        if world.size > 1:
            address = _address(world.rendezvous)
            host = address[0] if address else "127.0.0.1"
            listener = _listener(host) if world.rank == 0 else None
            port = world.gather(listener.getsockname()[1] if listener else 0, int)[0]
            listener_options: dict[str, Any] = (
                {"is_master": True, "master_listen_fd": listener.detach()} if listener else {}
            )
            self._store = TCPStore(host, port, wait_for_workers=False, **listener_options)

    def send_word(self, word: bytes) -> None:
        """Send a word from rank 0. The word before the last is deleted: a meeting took place since."""
        self._word_count += 1
        self._store.set(f"word {self._word_count}", word)
        self._store.delete_key(f"word {self._word_count - 2}")

    def next_word(self) -> bytes | None:
        """Return the next word on the other ranks; None: not sent yet."""
        if not self._store.check([name := f"word {self._word_count + 1}"]):
            return None
        self._word_count += 1
        return bytes(self._store.get(name))

    def arrive_at_meeting(self) -> None:
        """Count this rank at the next meeting."""
        self._meetings += 1
        self._store.add("arrived", 1)

    @property
    def all_arrived(self) -> bool:
        """True if all ranks have arrived at this rank's meeting."""
        return self._store.add("arrived", 0) >= self._meetings * self._size


def _listener(host: str) -> socket.socket:
    """Return a socket on this machine's address of that name alone, and a free port."""
    with ConfigError.instead_of(OSError, text=f"trainer rank 0 cannot listen on {host}, its node's address"):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)


Meet = Callable[[Iterator[str]], None]


def wait_to_meet(waits: Iterator[str]) -> None:
    """Wait until all ranks have met. `waits` yields the name of the wait again and again until then."""
    for _ in waits:
        time.sleep(MEET_POLL)


def join_ranks(
    rank: int,
    size: int,
    rendezvous: str = "",
    device: str = "auto",
    timeout_s: float = 600.0,
    meet_s: float = 600.0,
    wait_for_ranks: Meet = wait_to_meet,
) -> World:
    """Enter the process group. Every collective fails after `timeout_s` instead of waiting for ever; so does
    the creation of NCCL's communicator, for which a collective would wait without a limit.

    `rendezvous` is a fresh `tcp://host:port` or the path of a new file, the same for all ranks; a rank alone
    needs none. `wait_for_ranks` waits for all ranks, at most `meet_s` seconds (DeadlineError). Raises
    ConfigError for a device that this machine does not have.
    """
    rank_device = _device(device, rank)
    if size > 1 and not rendezvous:
        raise ConfigError(f"{size} trainer ranks need a rendezvous address")
    backend = "cpu:gloo,cuda:nccl" if rank_device.type == "cuda" else "gloo"
    meeting = _Meeting(rank, size, rendezvous, meet_s)
    wait_for_ranks(meeting.waits())
    meeting.store.set_timeout(timedelta(seconds=timeout_s))  # torch does so for a URL only
    init_group = partial(
        dist.init_process_group,
        backend,
        store=meeting.store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )

    if rank_device.type == "cuda" and size > 1:
        wait_for_ranks(_wait_for_nccl(partial(_init_nccl, init_group, rank_device), rank_device, timeout_s))
    else:
        init_group()

    return World(rank, size, rank_device, init_device_mesh(rank_device.type, (size,)), rendezvous=rendezvous)


def _init_nccl(init_group: Callable[..., None], device: torch.device) -> None:
    """Enter the process group from a separate thread, and make its communicator on this rank's GPU: bound to
    the device, torch makes it at once, and the sum shows that all ranks have it."""
    torch.cuda.set_device(device)  # the device of this thread
    init_group(device_id=device)
    rank_count = torch.ones(1, device=device)
    dist.all_reduce(rank_count)
    rank_count.item()  # waits for the device


def _wait_for_nccl(init_nccl: Callable[[], None], device: torch.device, limit: float) -> Iterator[str]:
    """Yield the name of the wait while `init_nccl` runs, uninterruptible, in a thread that keeps no process
    from ending. Raises its error, and DeadlineError after `limit` seconds."""
    nccl_future: Future[None] = Future()
    threading.Thread(target=fulfil, args=(nccl_future, init_nccl), name="nccl-join", daemon=True).start()

    deadline = time.monotonic() + limit
    while not nccl_future.done():
        yield f"trainer ranks connect their GPUs with NCCL (this rank: {device})"

        if time.monotonic() > deadline:
            raise DeadlineError(
                f"NCCL did not connect the trainer's ranks within {limit:g} s; set NCCL_DEBUG=INFO to "
                "see why, or set NCCL_SOCKET_IFNAME to choose the network interface"
            )

    nccl_future.result()


class _Meeting:
    """The store through which ranks exchange their addresses, and the wait until all have arrived. torch's
    own rendezvous takes a URL, whose path it does not decode, and names no wait."""

    def __init__(self, rank: int, size: int, rendezvous: str, limit: float) -> None:
        self._rank = rank
        self._size = size
        self._rendezvous = rendezvous
        self._meet_limit = limit
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        assert self._store is not None, "the ranks have not connected"
        return self._store

    def waits(self) -> Iterator[str]:
        """Yield the name of the wait while ranks are missing. Raises DeadlineError after the limit."""
        deadline = time.monotonic() + self._meet_limit
        while missing_ranks := self._missing_ranks():
            missing_names = ", ".join(map(str, missing_ranks))
            wait_name = f"trainer ranks {missing_names} of {self._size} to join"
            yield wait_name

            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {self._meet_limit:g} s at {self._rendezvous} for {wait_name}; see "
                    f"logs/trainer-{missing_ranks[0]}.log"
                )

    def _missing_ranks(self) -> list[int]:
        """Return the ranks that have not arrived yet; rank 0 alone while its store does not answer."""
        try:
            if self._store is None:
                store = self._open_store()
                store.set(f"rank {self._rank}", "")
                self._store = store
        except DistNetworkError:
            if self._rank == 0:
                raise
            return [0]

        return [rank for rank in range(self._size) if not self._store.check([f"rank {rank}"])]

    def _open_store(self) -> Store:
        if not self._rendezvous:
            return HashStore()
        address = _address(self._rendezvous)
        if address is None:
            return FileStore(self._rendezvous, self._size)
        host, port = address
        is_master = self._rank == 0
        dial_seconds = OWN_DIAL_SECONDS if is_master else DIAL_SECONDS

        return TCPStore(
            host,
            port,
            self._size,
            is_master=is_master,
            timeout=timedelta(seconds=dial_seconds),
            wait_for_workers=False,
        )


def _address(rendezvous: str) -> tuple[str, int] | None:
    """Return host and port of a rendezvous; None for a file."""
    if not rendezvous.startswith(TCP):
        return None
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    return host.strip("[]"), int(port)


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, but torch sees no GPU here; use auto or cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SequenceRanks:
    """This rank, number `index` of the `count` ranks of `group`, all of which compute the same
    micro-batch."""

    group: dist.ProcessGroup
    index: int
    count: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, size: int, attend_heads: Attend) -> Tensor:
        """Compute attention among `size` tokens, of which this rank has t, perhaps with padding at the end:
        query [heads, t, d], key and value [kv_heads, t, d]; returns [t, heads, d]. `attend_heads` computes
        some heads of all tokens. KV heads that are no multiple of the ranks are repeated."""
        copies = self.count // gcd(self.count, key.shape[0])
        key, value = (heads.repeat_interleave(copies, 0) for heads in (key, value))
        query, key, value = (self.exchange(heads)[:, :size] for heads in (query, key, value))
        output = attend_heads(query, key, value)
        return self.exchange(pad(output, (0, 0, 0, 0, 0, self.count * self.width(size) - size)))

    def exchange(self, tensor: Tensor) -> Tensor:
        """Scatter the first dimension and gather the second: [a, b, d] to [a/S, S·b, d]."""
        exchanged: Tensor = _Exchange.apply(tensor, self.group)
        return exchanged.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2)

    def gather(self, own_values: Tensor, most_values: int) -> Tensor:
        """Gather [n] of each rank, at most `most_values`, padded with 0: [S·most_values]."""
        padded_values = pad(own_values, (0, most_values - len(own_values)))
        return self.exchange(padded_values.expand(self.count, -1)[..., None]).flatten()

    def width(self, size: int) -> int:
        """Return the tokens of a rank's part of `size`, including padding."""
        return -(-size // self.count)


class _Exchange(Function):
    """An all-to-all of equal parts of the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    exchanged = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.all_to_all_single(exchanged, tensor.contiguous(), group=group)
    return exchanged
