"""Tap channels inside one process: headers, rules, the choice of a transport, relayed taps."""

from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hf_codraft.taps.channel import TapChannel, TapError, TapProtocolError, TapRoute
from hf_codraft.taps.protocol import DTYPES, HEADER_WORDS, Header, RingPlan, payload_view, tensor_crc
from hf_codraft.taps.transports.choice import TRANSPORTS, Choice, Surroundings, choose_transport
from hf_codraft.taps.transports.relay import Relay, RelayTransport, carried_into
from hf_codraft.taps.transports.shm import SharedMemory, ShmRing

ROUTES = [TapRoute(0, 0, 0, 24, torch.float32), TapRoute(3, 1, 0, 24, torch.float32)]


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=90))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def channel(group):
    channel = TapChannel(ROUTES, [0], num_slots=2, timeout_s=10.0)
    channel.setup()
    return channel


# Headers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 2, 3, 1, 2, 2)])
def test_a_header_survives_its_words_and_reads_its_bytes(dtype, shape):
    header = Header(2**40, 5, 3, 8, 7, dtype, shape, 2**32 - 1)
    words = header.to_words()
    assert len(words) == HEADER_WORDS and Header.from_words(words, max_bytes=header.num_bytes) == header
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    slot = torch.zeros(256, dtype=torch.uint8)
    payload_view(slot, header).copy_(tensor)
    assert torch.equal(payload_view(slot, header), tensor)
    assert tensor_crc(payload_view(slot, header)) == tensor_crc(tensor)


def test_the_crc_is_that_of_the_values_in_row_major_order():
    tensor = torch.arange(12.0).view(3, 4)
    assert tensor_crc(tensor.t()) == tensor_crc(tensor.t().contiguous()) != tensor_crc(tensor)
    assert tensor_crc(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=torch.uint8) + 48) == 0xCBF43926  # "123456789"


@pytest.mark.parametrize(("word", "value"), [(0, 0), (5, 4), (5, -1), (6, 7), (7, 6), (13, 48)])
def test_words_that_are_no_header_are_named(word, value):
    words = Header(1, 5, 3, 8, 7, torch.float32, (5, 2), 0).to_words()
    words[word] = value
    with pytest.raises(TapProtocolError, match="a slot of at most 40 bytes holds no tap header"):
        Header.from_words(words, max_bytes=40)


# One rank that owns and collects everything


def test_local_taps_are_references_cut_from_the_graph(channel):
    assert channel.describe() == (
        "taps [0, 3] to rank(s) [0] by local (every tap is read by the rank that owns it), 2 slot(s)"
    )
    tensor = torch.randn(2, 3, requires_grad=True) * 2
    for step in (4, 5):
        channel.begin_step(step, 3)
        for microbatch in range(3):
            for tap_id in (0, 3):
                channel.publish(microbatch, tap_id, tensor)
        held = [channel.collect(microbatch) for microbatch in range(3)]  # no slots: nothing is copied
        assert all(taps[3].data_ptr() == tensor.data_ptr() and not taps[3].requires_grad for taps in held)
        for microbatch in range(3):
            channel.release(microbatch)
        channel.end_step()
    assert (channel.totals.num_published, channel.totals.num_collected, channel.totals.bytes_published) == (12, 12, 0)
    channel.close()
    with pytest.raises(TapError, match=r"begin_step\(6\) on a channel that has ended \(closed\)"):
        channel.begin_step(6, 1)


def publish_two(channel):
    channel.begin_step(7, 3)
    for tap_id in (0, 3):
        channel.publish(0, tap_id, torch.zeros(4))


def in_step(call):
    def run(channel):
        publish_two(channel)
        call(channel)

    return run


MISUSES = {
    r"publish\(0, tap 0\) outside a step": lambda c: c.publish(0, 0, torch.zeros(4)),
    r"collect\(0\) outside a step": lambda c: c.collect(0),
    r"release\(0\) outside a step": lambda c: c.release(0),
    r"end_step outside a step": lambda c: c.end_step(),
    r"num_microbatches \(0\) must be at least 1": lambda c: c.begin_step(0, 0),
    r"begin_step\(8\) while step 7 is open": in_step(lambda c: c.begin_step(8, 3)),
    r"close\(\) while step 7 is open": in_step(lambda c: c.close()),
    r"publish\(0, tap 3\): it was published before": in_step(lambda c: c.publish(0, 3, torch.zeros(4))),
    r"publish\(2, tap 3\): rank 0 is due microbatch 1 of 3": in_step(lambda c: c.publish(2, 3, torch.zeros(4))),
    r"publish\(1, tap 4\): there is no such tap; the routes have \[0, 3\]": in_step(
        lambda c: c.publish(1, 4, torch.zeros(4))
    ),
    r"shape \(5, 5\) has 25 elements, a slot has room for 24": in_step(lambda c: c.publish(1, 0, torch.zeros(5, 5))),
    r"a tensor of torch.bfloat16": in_step(lambda c: c.publish(1, 0, torch.zeros(4, dtype=torch.bfloat16))),
    r"and 7 dimensions on cpu": in_step(lambda c: c.publish(1, 0, torch.zeros(1, 1, 1, 1, 1, 1, 1))),
    r"a tensor of torch.float32 and 1 dimensions on meta": in_step(lambda c: c.publish(1, 0, torch.zeros(4, device="meta"))),
    r"collect\(1\): due is microbatch 0": in_step(lambda c: c.collect(1)),
    r"release\(0\): held are \[\]": in_step(lambda c: c.release(0)),
    r"tap 0 of microbatch 1 from rank 0 \(stage 0\) did not come: nothing was handed over": in_step(
        lambda c: (c.collect(0), c.collect(1))
    ),
    r"step 7: end_step: tap 0 \(stage 0\) of microbatches \[1, 2\] was not published; tap 3 \(stage 1\) of microbatches "
    r"\[1, 2\] was not published; microbatches \[1, 2\] were not collected; microbatches \[0\] were not released": in_step(
        lambda c: (c.collect(0), c.end_step())
    ),
    "setup was called twice": lambda c: c.setup(),
}  # fmt: skip


@pytest.mark.parametrize("message", list(MISUSES))
def test_misuse_is_named_and_ends_the_channel(channel, message):
    with pytest.raises(TapProtocolError, match=message):
        MISUSES[message](channel)
    if "twice" not in message:
        with pytest.raises(TapError, match="on a channel that has ended"):
            channel.publish(0, 0, torch.zeros(4))


def test_a_channel_does_nothing_before_setup():
    with pytest.raises(TapProtocolError, match="before setup"):
        TapChannel(ROUTES, [0], num_slots=1).begin_step(0, 1)


def test_an_error_inside_the_context_ends_the_channel_and_comes_out_unchanged(channel):
    with pytest.raises(ZeroDivisionError), channel:
        channel.begin_step(0, 1)
        1 / 0  # noqa: B018
    with pytest.raises(TapError, match="has ended \\(ZeroDivisionError: division by zero\\)"):
        channel.begin_step(1, 1)


WRONG = {
    "routes must name at least one tap": dict(routes=[]),
    "and none twice": dict(routes=[ROUTES[0], ROUTES[0]]),
    "needs a dtype among": dict(routes=[TapRoute(0, 0, 0, 24, torch.int64)]),
    "an owner_rank below 1": dict(routes=[TapRoute(0, 0, 1, 24, torch.float32)]),
    "max_numel >= 1": dict(routes=[TapRoute(0, 0, 0, 0, torch.float32)]),
    r"sink_ranks \(\[1\]\) must be ranks below 1": dict(sink_ranks=[1]),
    r"sink_ranks \(\[\]\)": dict(sink_ranks=[]),
    r"num_slots \(0\)": dict(num_slots=0),
    r"timeout_s \(60\) times 1.5 must be shorter than the process group's timeout \(90 s\)": dict(timeout_s=60.0),
    "transport \\('pigeon'\\) must be": dict(transport="pigeon"),
    # an error like any other on the rank that has it, since the others wait to hear of it
    "rank 0: TypeError: '<' not supported": dict(num_slots="3"),
}


@pytest.mark.parametrize("message", list(WRONG))
def test_wrong_arguments_are_named(group, message):
    arguments = dict(routes=ROUTES, sink_ranks=[0], num_slots=2, timeout_s=10.0) | WRONG[message]
    channel = TapChannel(arguments.pop("routes"), arguments.pop("sink_ranks"), **arguments)
    for check in (channel.choose, channel.setup):
        with pytest.raises(ValueError, match=message):
            check()


def test_choosing_opens_nothing(group):
    channel = TapChannel(ROUTES, [0], num_slots=2, timeout_s=10.0)
    assert channel.choose().name == "local" and channel.describe() == "taps: not set up"
    with pytest.raises(TapProtocolError, match="before setup"):
        channel.begin_step(0, 1)


# Which microbatch goes where


def test_sinks_take_turns():
    routes = [TapRoute(0, 0, 0, 24, torch.float32)]
    assert [TapChannel(routes, [3], num_slots=1).sink_of(m) for m in range(4)] == [3, 3, 3, 3]
    assert [TapChannel(routes, range(3), num_slots=1).sink_of(m) for m in range(5)] == [0, 1, 2, 0, 1]


# Choice

TWO = [TapRoute(0, 0, 0, 8, torch.float32), TapRoute(9, 1, 1, 8, torch.float32)]


def choose(name="auto", *, routes=TWO, sink_ranks=(1,), **changes) -> Choice:
    around = dict(is_cuda=False, num_hosts=1, shm_problem="", ipc_problem="", nccl_problem="") | changes
    return choose_transport(name, routes=routes, sink_ranks=sink_ranks, surroundings=Surroundings(**around))


def test_the_automatic_choice_and_its_reason():
    assert choose(routes=TWO[1:]) == Choice("local", "every tap is read by the rank that owns it")
    assert choose() == Choice("shm", "the taps lie on the CPU of one host")
    assert choose(num_hosts=2) == Choice("gloo", "the taps lie on the CPU; not shm: the ranks lie on 2 hosts")
    assert choose(shm_problem="x").reason == "the taps lie on the CPU; not shm: x"
    assert choose(is_cuda=True) == Choice("cuda_ipc", "the taps lie on GPUs of one host; not run on a GPU")
    assert choose(is_cuda=True, num_hosts=2, ipc_problem="x").reason == (
        "the taps lie on GPUs; not cuda_ipc: the ranks lie on 2 hosts; not run on a GPU"
    )
    segments = "this device's memory can't be shared (expandable segments?): y"
    assert choose(is_cuda=True, ipc_problem=segments) == Choice(
        "nccl", f"the taps lie on GPUs; not cuda_ipc: {segments}; not run on a GPU"
    )
    assert choose(is_cuda=True, ipc_problem=segments, nccl_problem="this torch was built without NCCL") == Choice(
        "relay", f"not cuda_ipc: {segments}; not nccl: this torch was built without NCCL"
    )
    with pytest.raises(
        ValueError, match=r"no transport can carry the taps to sink_ranks \(\[0, 1\]\): cuda_ipc: y; nccl: "
    ):
        choose(is_cuda=True, ipc_problem="y", nccl_problem="this torch was built without NCCL", sink_ranks=(0, 1))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_forced_transport_works_or_says_why_not(name):
    can = {
        "local": dict(routes=TWO[1:]), "shm": {}, "gloo": dict(num_hosts=3), "cuda_ipc": dict(is_cuda=True),
        "nccl": dict(is_cuda=True, num_hosts=3), "relay": dict(is_cuda=True, num_hosts=3),
    }  # fmt: skip
    cannot = {
        "local": ({}, "taps are owned by ranks [0, 1] and read by ranks [1]"),
        "shm": (dict(num_hosts=2), "the ranks lie on 2 hosts"),
        "gloo": (dict(is_cuda=True), "gloo moves host memory and the taps lie on GPUs"),
        "cuda_ipc": (dict(is_cuda=True, ipc_problem="a probe failed"), "a probe failed"),
        "nccl": ({}, "nccl moves GPU memory and the taps lie on the CPU"),
        "relay": (
            dict(sink_ranks=(0, 1)),
            "activations only flow to the last stage (rank 1), and the sinks are [0, 1]",
        ),
    }
    choice = choose(name, **can[name])
    assert choice.name == name
    assert ("not run on a GPU" in choice.reason) == (name in ("cuda_ipc", "nccl"))
    changes, why = cannot[name]
    with pytest.raises(ValueError) as error:
        choose(name, **changes)
    assert str(error.value) == f"transport={name!r} can't work: {why}. Use transport='auto'."


# A ring in shared memory, both ends here


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_read_cursor_does_not_give_slots_back(group, num_slots):
    plan = RingPlan(TapRoute(3, 0, 0, 40, torch.float32), 0, num_slots)
    memory = SharedMemory(group, 64 + ShmRing.num_bytes(plan))
    source, sink = (ShmRing(plan, memory, offset=64, timeout_s=0.05) for _ in range(2))
    tensors = [torch.randn(1 + i % 7, 5) for i in range(4 * num_slots)]
    headers = [Header(i + 1, 0, i, 99, 3, torch.float32, tuple(x.shape), 0) for i, x in enumerate(tensors)]
    for start in range(0, len(tensors), num_slots):
        batch = range(start, start + num_slots)
        for i in batch:
            source.write(headers[i], tensors[i])
        views = [sink.read(i + 1)[1] for i in batch]
        with pytest.raises(TapError, match="waited"):  # all read, none released
            source.wait_for_room(start + num_slots + 1)
        assert all(torch.equal(view, tensors[i]) for i, view in zip(batch, views))
        for _ in batch:
            sink.release()
    with pytest.raises(TapError, match=r"waited 0.05 s"):
        sink.read(len(tensors) + 1)
    memory.close()


# Relayed taps


def test_relayed_taps_ride_through_the_stages_to_the_last():
    """Four stages on two ranks, interleaved: rank 1 owns the stages 1 and 3 (the last)."""
    routes = [
        TapRoute(0, 0, 0, 8, torch.float32), TapRoute(2, 0, 0, 8, torch.float32), TapRoute(4, 1, 1, 8, torch.float32),
        TapRoute(5, 2, 0, 8, torch.float32), TapRoute(9, 3, 1, 8, torch.float32),
    ]  # fmt: skip
    assert [[x.tap_id for x in carried_into(routes, stage, sink_rank=1)] for stage in range(4)] == [
        [],
        [0, 2],
        [0, 2],
        [0, 2, 5],
    ]
    plans = [RingPlan(route, 1, 2) for route in routes if route.owner_rank != 1]
    source, sink = (RelayTransport(routes, rank=rank, sink_rank=1) for rank in (0, 1))
    source_rings, sink_rings = source.open(plans), sink.open(plans)
    taps = {(m, route.tap_id): torch.randn(3) for m in range(3) for route in routes}

    def publish(microbatch, tap_id):
        header = Header(microbatch + 1, 7, microbatch, 3, tap_id, torch.float32, (3,), 0)
        source_rings[tap_id, 1].write(header, taps[microbatch, tap_id])

    for microbatch in range(3):
        publish(microbatch, 0)
        publish(microbatch, 2)
        extras = source.outputs(0, microbatch=microbatch, received=())
        extras = sink.outputs(1, microbatch=microbatch, received=extras)
        publish(microbatch, 5)
        extras = source.outputs(2, microbatch=microbatch, received=extras)
        sink.deliver(extras, stage=3, step=7, microbatch=microbatch, num_microbatches=3)
        for tap_id in (0, 2, 5):
            header, tensor = sink_rings[tap_id, 1].read(microbatch + 1)
            assert (header.sequence, header.step, header.microbatch, header.tap_id) == (
                microbatch + 1,
                7,
                microbatch,
                tap_id,
            )
            assert torch.equal(tensor, taps[microbatch, tap_id])

    publish(0, 0)
    with pytest.raises(TapProtocolError, match="sends microbatch 1 on, but of tap 0 it holds microbatch 0"):
        source.outputs(0, microbatch=1, received=())
    with pytest.raises(TapProtocolError, match="sends microbatch 1 on, but of tap 5 it holds microbatch None"):
        source.outputs(2, microbatch=1, received=())
    with pytest.raises(TapProtocolError, match=r"stage 3 received 2 tensors for its taps \[0, 2, 5\]"):
        sink.deliver([torch.zeros(3)] * 2, stage=3, step=0, microbatch=0, num_microbatches=1)


def relayed(taps, *, spoil):
    """One microbatch over three stages on three ranks; `spoil` is called with what may change on the way, by name."""
    routes = [
        TapRoute(0, 0, 0, 8, torch.float32),
        TapRoute(3, 1, 1, 8, torch.float32),
        TapRoute(9, 2, 2, 8, torch.float32),
    ]
    plans = [RingPlan(route, 2, 2) for route in routes[:2]]
    num_sent: list[list[int]] = [[], [], []]
    extras, rings = (), {}
    for rank in range(3):
        transport = RelayTransport(routes, rank=rank, sink_rank=2, check_crc=True)
        rings = transport.open(plans)
        if rank < 2:
            tap_id, tensor = routes[rank].tap_id, taps[rank]
            header = Header(1, 5, 0, 1, tap_id, torch.float32, tuple(tensor.shape), tensor_crc(tensor))
            rings[tap_id, 2].write(header, tensor)
            spoil(tensor)
        extras = Relay(transport, 5, 1, num_sent[rank].append).pass_on(rank, 0, extras)
    return num_sent, [rings[tap_id, 2].read(1) for tap_id in (0, 3)]


def test_relayed_taps_are_counted_on_every_hop_and_have_a_crc_from_arrival_on():
    taps = [torch.arange(1.0, 7.0), torch.arange(2.0, 8.0)]
    num_sent, arrived = relayed(taps, spoil=lambda tensor: None)
    assert num_sent == [[24], [48], []]
    assert [header.crc for header, _ in arrived] == [tensor_crc(tensor) for tensor in taps]
    with pytest.raises(TapProtocolError, match=r"tap 0 changed since it was published \(crc\)"):
        relayed(taps, spoil=lambda tensor: tensor.neg_())
