"""What messages between ranks promise: whole tensors, named errors, no endless wait, exact counts."""

import pytest
import torch

from hf_codraft.attention.transport import HEADER_BYTES, Spec, run_local_ranks

CPU = torch.device("cpu")


def send_on(transport, tensors, specs=None, *, layout_id=7, what="numbers"):
    """Sends to the next rank and takes from the one before."""
    rank, world = transport.rank, transport.world
    specs = specs or [Spec(tuple(x.shape), x.dtype) for x in tensors]
    deliveries = transport.exchange(
        [((rank + 1) % world, tensors)], [((rank - 1) % world, specs)], layout_id=layout_id, device=CPU, what=what
    )
    return deliveries[0].wait()


def test_tensors_of_several_dtypes_arrive_whole_and_are_counted():
    def tensors(rank):
        generator = torch.Generator().manual_seed(rank)
        odd = torch.rand(3, generator=generator) < 0.5  # what follows is not aligned
        narrow = torch.randn(5, 3, generator=generator).bfloat16()
        return [odd, narrow, torch.randn(2, generator=generator).double(), torch.zeros(0, 4), narrow.T]

    def one_rank(transport):
        got = [send_on(transport, tensors(transport.rank)) for _ in range(2)]
        counted = transport.traffic.num_bytes, transport.traffic.num_messages
        transport.traffic.reset()
        return got, counted, (transport.traffic.num_bytes, transport.traffic.num_messages)

    size = HEADER_BYTES + 3 + 30 + 16 + 30
    for rank, (got, counted, after_reset) in enumerate(run_local_ranks(one_rank, 3)):
        for arrived in got:
            for x, want in zip(arrived, tensors((rank - 1) % 3), strict=True):
                assert x.dtype == want.dtype and torch.equal(x, want)
        assert counted == (2 * size, 2)
        assert after_reset == (0, 0)


def test_an_empty_parcel_is_not_sent():
    def one_rank(transport):
        (got,) = send_on(transport, [torch.zeros(0, 3)])
        return got.shape, transport.traffic.num_messages

    assert run_local_ranks(one_rank, 2) == [((0, 3), 0)] * 2


def test_messages_between_two_ranks_keep_their_order():
    def one_rank(transport):
        peer = 1 - transport.rank
        waiting = [
            transport.exchange(
                [(peer, [torch.tensor([n])])], [(peer, [Spec((1,), torch.int64)])], layout_id=7, device=CPU, what="n"
            )[0]
            for n in range(4)
        ]
        return [delivery.wait()[0].item() for delivery in reversed(waiting)]

    assert run_local_ranks(one_rank, 2) == [[3, 2, 1, 0]] * 2


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
