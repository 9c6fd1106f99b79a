"""What messages between ranks promise: whole tensors, named errors, no endless wait, exact counts."""

from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hf_codraft.attention.transport import HEADER_BYTES, GroupTransport, Spec, run_local_ranks

CPU = torch.device("cpu")


def send_on(transport, tensors, specs=None, *, layout_id=7, what="numbers"):
    """Sends to the next rank and takes from the one before."""
    rank, world = transport.rank, transport.world
    specs = specs or [Spec(tuple(x.shape), x.dtype) for x in tensors]
    deliveries = transport.exchange(
        [((rank + 1) % world, tensors)], [((rank - 1) % world, specs)], layout_id=layout_id, device=CPU, what=what
    )
    return deliveries[0].wait()


def several_dtypes(rank):
    generator = torch.Generator().manual_seed(rank)
    odd = torch.rand(3, generator=generator) < 0.5  # what follows is not aligned
    narrow = torch.randn(5, 3, generator=generator).bfloat16()
    return [odd, narrow, torch.randn(2, generator=generator).double(), torch.zeros(0, 4), narrow.T]


def send_several_dtypes(transport):
    got = [send_on(transport, several_dtypes(transport.rank)) for _ in range(2)]
    counted = transport.traffic.num_bytes, transport.traffic.num_messages
    transport.traffic.reset()
    return got, counted, (transport.traffic.num_bytes, transport.traffic.num_messages)


def assert_several_dtypes_came(results):
    size = HEADER_BYTES + 3 + 30 + 16 + 30
    for rank, (got, counted, after_reset) in enumerate(results):
        for arrived in got:
            for x, want in zip(arrived, several_dtypes((rank - 1) % len(results)), strict=True):
                assert x.dtype == want.dtype and torch.equal(x, want)
        assert counted == (2 * size, 2)
        assert after_reset == (0, 0)


def test_tensors_of_several_dtypes_arrive_whole_and_are_counted():
    assert_several_dtypes_came(run_local_ranks(send_several_dtypes, 3))


def send_nothing(transport):
    transport.traffic.reset()
    (got,) = send_on(transport, [torch.zeros(0, 3)])
    return got.shape, transport.traffic.num_messages


def test_an_empty_parcel_is_not_sent():
    assert run_local_ranks(send_nothing, 2) == [((0, 3), 0)] * 2


def send_four_and_wait_from_the_last(transport):
    peer = 1 - transport.rank
    waiting = [
        transport.exchange(
            [(peer, [torch.tensor([n])])], [(peer, [Spec((1,), torch.int64)])], layout_id=7, device=CPU, what="n"
        )[0]
        for n in range(4)
    ]
    return [delivery.wait()[0].item() for delivery in reversed(waiting)]


def test_messages_between_two_ranks_keep_their_order():
    assert run_local_ranks(send_four_and_wait_from_the_last, 2) == [[3, 2, 1, 0]] * 2


@pytest.mark.parametrize("differs", ["layout", "size"])
def test_ranks_whose_layouts_differ_get_an_error_that_says_so(differs):
    errors = {}

    def one_rank(transport):
        layout_id = 7 + transport.rank if differs == "layout" else 7
        num = 2 + transport.rank if differs == "size" else 2
        try:
            send_on(transport, [torch.zeros(num)], layout_id=layout_id, what="keys")
        except RuntimeError as error:
            errors[transport.rank] = str(error)
            raise

    with pytest.raises(RuntimeError, match=r"expected keys of layout 7|expected keys of layout 8"):
        run_local_ranks(one_rank, 2, timeout_s=5)
    assert set(errors) == {0, 1}
    assert any("All ranks must build the same PackedLayout" in error for error in errors.values())


def test_a_rank_that_fails_ends_the_others_at_once():
    gave_up = {}

    def one_rank(transport):
        if transport.rank == 1:
            raise ArithmeticError("on purpose")
        try:
            send_on(transport, [torch.zeros(2)], what="keys")
        except RuntimeError as error:
            gave_up[transport.rank] = str(error)
            raise

    with pytest.raises(ArithmeticError, match="on purpose"):
        run_local_ranks(one_rank, 3, timeout_s=60)
    assert "rank 2 gives up waiting for keys: another rank failed" in gave_up[2]


def test_a_wait_without_an_answer_names_who_waited_for_whom_and_what():
    def one_rank(transport):
        if transport.rank == 0:
            transport.exchange([], [(1, [Spec((2,), torch.float32)])], layout_id=7, device=CPU, what="keys")[0].wait()

    with pytest.raises(TimeoutError, match="rank 0 waited 0 s for keys from rank 1; do all ranks make the same calls"):
        run_local_ranks(one_rank, 2, timeout_s=0.2)


# Over a process group

MISFITS = {  # the layout and the number of elements of each rank
    "layouts differ": ((7, 2), (8, 2)),
    "sizes differ": ((7, 2), (7, 3)),
    "both differ": ((7, 5), (8, 2)),
}


def own_group(timeout_s):
    """What one misfit leaves behind must not meet the next."""
    return GroupTransport(dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s)))


def fails_with(act) -> str:
    with pytest.raises(RuntimeError) as error:
        act()
    dist.barrier()  # a rank that has its error must not leave before the other has its own
    return str(error.value)


def over_gloo(rank):
    transport = GroupTransport()
    fits = send_several_dtypes(transport), send_nothing(transport), send_four_and_wait_from_the_last(transport)
    misfits = {}
    for name, sides in MISFITS.items():
        layout_id, num = sides[rank]
        between = own_group(30)
        misfits[name] = fails_with(
            lambda: send_on(between, [torch.ones(num)], layout_id=layout_id, what="keys")  # noqa: B023
        )
    between = own_group(0.5)
    one_waits = fails_with(lambda: send_on(between, [torch.ones(2)], what="keys")) if rank == 0 else dist.barrier()
    return fits, misfits, one_waits


@pytest.mark.slow
def test_a_process_group_keeps_the_same_promises(run_ranks):
    """Ranks that expect something else than was sent get the error of `test_ranks_whose_layouts_differ_...`."""
    results = run_ranks(over_gloo, 2)
    fits, misfits, one_waits = zip(*results)
    several, nothing, order = zip(*fits)
    assert_several_dtypes_came(several)
    assert nothing == (((0, 3), 0),) * 2 and order == ([3, 2, 1, 0],) * 2
    for name, sides in MISFITS.items():
        for rank, error in enumerate(misfit[name] for misfit in misfits):
            (own_id, own_num), (other_id, other_num) = sides[rank], sides[1 - rank]
            assert (
                f"rank {rank} expected keys of layout {own_id} ({4 * own_num} bytes) from rank {1 - rank}, but that rank "
                f"sent layout {other_id} ({4 * other_num} bytes)"
            ) in error, name
    assert "rank 0 waited for keys from rank 1: " in one_waits[0]
    assert "Did that rank fail, or does its layout differ?" in one_waits[0]
