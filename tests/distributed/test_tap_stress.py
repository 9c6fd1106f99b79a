"""Tens of thousands of taps through a shared-memory ring, and broken rings, which must not get through."""

import random
import time
from dataclasses import replace

import pytest
import torch
from tap_ranks import open_channel, outcomes_of_cases

from hf_codraft.taps.channel import TapChannel, TapRoute
from hf_codraft.taps.transports.shm import ShmRing, ShmTransport

NUM_TAPS = 2


class SequenceFirst(ShmRing):
    """Announces a message before it is there."""

    def write(self, header, payload):
        self.wait_for_room(header.sequence)
        self._write_sequence(header.sequence)
        time.sleep(random.random() * 2e-4)
        self._write_payload(header, payload)
        self._write_header(header)


class HeaderFirst(ShmRing):
    """Announces a message whose header is there, its payload not."""

    def write(self, header, payload):
        self.wait_for_room(header.sequence)
        self._write_header(header)
        self._write_sequence(header.sequence)
        time.sleep(random.random() * 2e-4)
        self._write_payload(header, payload)


class EarlyRelease(ShmRing):
    """Gives the slot back as soon as it was read."""

    def read(self, sequence):
        message = super().read(sequence)
        super().release()
        return message

    def release(self):
        pass


class NoBackPressure(ShmRing):
    """Writes into slots that are still held."""

    def wait_for_room(self, sequence):
        pass


class LostTap(ShmRing):
    """Loses one message."""

    def write(self, header, payload):
        if header.sequence != 57:
            super().write(header, payload)


class Renumbered(ShmRing):
    """Loses one message and closes the gap."""

    def write(self, header, payload):
        if header.sequence != 57:
            super().write(replace(header, sequence=header.sequence - (header.sequence > 57)), payload)


class SentTwice(ShmRing):
    """Sends one message twice."""

    def write(self, header, payload):
        super().write(replace(header, sequence=header.sequence + (header.sequence > 57)), payload)
        if header.sequence == 57:
            super().write(replace(header, sequence=58), payload)


class WrongBytes(ShmRing):
    """Changes one element of one message."""

    def _write_payload(self, header, payload):
        super()._write_payload(header, payload + (header.sequence == 57))


MUTANTS = {
    SequenceFirst: ("TapProtocolError",),
    HeaderFirst: ("TapProtocolError",),
    EarlyRelease: ("TapProtocolError",),
    NoBackPressure: ("TapProtocolError",),
    LostTap: ("TapTimeout",),
    Renumbered: ("TapProtocolError",),
    # The second one takes the slot of another message: it is read in its place, or the ring stands still.
    SentTwice: ("TapProtocolError", "TapTimeout"),
    WrongBytes: ("TapProtocolError",),
}


def content(step: int, microbatch: int, tap_id: int) -> torch.Tensor:
    size = 1 + (7 * step + 3 * microbatch) % 64
    return torch.arange(size, dtype=torch.float32) + 1000 * tap_id + 17 * microbatch + step


def release(channel: TapChannel, microbatch: int, taps: dict[int, torch.Tensor], *, step: int, compares: bool) -> int:
    """Looks at the values of a sound ring; a broken one must be caught by the channel's own checks."""
    for tap_id, tensor in taps.items():
        assert not compares or torch.equal(tensor, content(step, microbatch, tap_id))
    channel.release(microbatch)
    return len(taps)


def stress(rank: int, ring_class: type[ShmRing], num_slots: int, num_steps: int, num_microbatches: int) -> int:
    """Source and sink in bursts of random length, each in turn the slower one; the sink holds random numbers of slots."""
    ShmTransport.ring_class = ring_class
    routes = [TapRoute(tap_id, 0, 0, 64, torch.float32) for tap_id in range(NUM_TAPS)]
    random.seed(rank)
    compared = 0
    with open_channel(routes, [1], transport="shm", num_slots=num_slots, check_crc=True, timeout_s=3.0) as channel:
        for step in range(num_steps):
            channel.begin_step(step, num_microbatches)
            held = []
            for microbatch in range(num_microbatches):
                if (microbatch // 20) % 2 == rank and random.random() < 0.2:
                    time.sleep(random.random() * 1e-3)
                if rank == 0:
                    for tap_id in range(NUM_TAPS):
                        channel.publish(microbatch, tap_id, content(step, microbatch, tap_id))
                    continue
                held.append((microbatch, channel.collect(microbatch)))
                while held and (len(held) == num_slots or random.random() < 0.5):
                    oldest, taps = held.pop(0)
                    compared += release(channel, oldest, taps, step=step, compares=ring_class is ShmRing)
            for oldest, taps in held:
                compared += release(channel, oldest, taps, step=step, compares=ring_class is ShmRing)
            channel.end_step()
    return compared


@pytest.mark.slow
def test_tens_of_thousands_of_taps_arrive_in_order_and_whole_with_1_2_and_many_slots():
    cases = {num_slots: (stress, (ShmRing, num_slots, 40, 100)) for num_slots in (1, 2, 13)}
    for outcomes in outcomes_of_cases(cases, 2, timeout_s=200.0).values():
        assert not outcomes[0].error and not outcomes[1].error, outcomes
        assert outcomes[1].value == 40 * 100 * NUM_TAPS


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 3])
def test_the_stress_lets_no_broken_ring_through(num_slots):
    cases = {mutant: (stress, (mutant, num_slots, 5, 100)) for mutant in (ShmRing, *MUTANTS)}
    outcomes = outcomes_of_cases(cases, 2, timeout_s=120.0)
    assert not any(outcome.error for outcome in outcomes.pop(ShmRing))
    for mutant, (source, sink) in outcomes.items():
        assert sink.error in MUTANTS[mutant], (mutant.__name__, sink)
        assert source.error == "TapPeerLost" or source.value is not None, (mutant.__name__, source)
