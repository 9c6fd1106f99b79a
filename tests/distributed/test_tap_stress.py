"""Tens of thousands of taps through the rings of shared memory and of gloo, and broken rings, which must not get through."""

import random
import time
from dataclasses import replace

import pytest
import torch
from tap_ranks import open_channel, outcomes_of_cases

from hf_codraft.taps.channel import TapChannel, TapRoute
from hf_codraft.taps.transports.gloo import GlooRing, GlooTransport
from hf_codraft.taps.transports.shm import ShmRing, ShmTransport

NUM_TAPS = 2

# Broken rings in shared memory


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


class NoBackPressure(ShmRing):
    """Writes into slots that are still held."""

    def wait_for_room(self, sequence):
        pass


# Broken rings over gloo, whose header and payload travel as one message


class Overwriting(GlooRing):
    """Writes into snapshots that gloo may not have sent yet."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.unfinished = []  # gloo forgets a transfer that nobody holds

    def _finish_oldest(self, timeout_s):
        if self._num_sent:
            self.unfinished.append(self._pending.popleft())
        else:
            super()._finish_oldest(timeout_s)


class SharedTag(GlooRing):
    """Two rings take each other's messages."""

    def __init__(self, plan, backend, **kwargs):
        super().__init__(plan, backend, **(kwargs | {"tag": 0}))


# Broken ends of any ring


class EarlyRelease:
    """Gives the slot back, or lets the next message into it, as soon as it was read."""

    def read(self, sequence):
        message = super().read(sequence)
        super().release()
        return message

    def release(self):
        pass


class LostTap:
    """Loses one message."""

    def write(self, header, payload):
        if header.sequence != 57:
            super().write(header, payload)


class Renumbered:
    """Loses one message and closes the gap."""

    def write(self, header, payload):
        if header.sequence != 57:
            super().write(replace(header, sequence=header.sequence - (header.sequence > 57)), payload)


class SentTwice:
    """Sends one message twice."""

    def write(self, header, payload):
        super().write(replace(header, sequence=header.sequence + (header.sequence > 57)), payload)
        if header.sequence == 57:
            super().write(replace(header, sequence=58), payload)


class WrongBytes:
    """Changes one element of one message."""

    def write(self, header, payload):
        super().write(header, payload + (header.sequence == 57))


RINGS = {"shm": (ShmTransport, ShmRing), "gloo": (GlooTransport, GlooRing)}
MUTANTS = {
    ("shm", SequenceFirst): ("TapProtocolError",),
    ("shm", HeaderFirst): ("TapProtocolError",),
    ("shm", EarlyRelease): ("TapProtocolError",),
    ("shm", NoBackPressure): ("TapProtocolError",),
    ("shm", LostTap): ("TapTimeout",),
    ("shm", Renumbered): ("TapProtocolError",),
    # The second one takes the slot of another message: it is read in its place, or the ring stands still.
    ("shm", SentTwice): ("TapProtocolError", "TapTimeout"),
    ("shm", WrongBytes): ("TapProtocolError",),
    ("gloo", EarlyRelease): ("TapProtocolError",),
    ("gloo", Overwriting): ("TapProtocolError",),
    ("gloo", SharedTag): ("TapProtocolError",),
    ("gloo", LostTap): ("TapProtocolError",),
    ("gloo", Renumbered): ("TapProtocolError",),
    ("gloo", SentTwice): ("TapProtocolError",),
    ("gloo", WrongBytes): ("TapProtocolError",),
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


def stress(
    rank: int, transport: str, mutant: type | None, num_slots: int, num_steps: int, num_microbatches: int
) -> int:
    """Source and sink in bursts of random length, each in turn the slower one; the sink holds random numbers of slots."""
    transport_class, sound = RINGS[transport]
    if mutant is None:
        transport_class.ring_class = sound
    else:
        transport_class.ring_class = mutant if issubclass(mutant, sound) else type("Broken", (mutant, sound), {})
    routes = [TapRoute(tap_id, 0, 0, 64, torch.float32) for tap_id in range(NUM_TAPS)]
    random.seed(rank)
    compared = 0
    with open_channel(routes, [1], transport=transport, num_slots=num_slots, check_crc=True, timeout_s=3.0) as channel:
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
                    compared += release(channel, oldest, taps, step=step, compares=mutant is None)
            for oldest, taps in held:
                compared += release(channel, oldest, taps, step=step, compares=mutant is None)
            channel.end_step()
    return compared


@pytest.mark.slow
def test_tens_of_thousands_of_taps_arrive_in_order_and_whole_with_1_2_and_many_slots():
    cases = {
        (transport, num_slots, num_steps): (stress, (transport, None, num_slots, num_steps, 100))
        for transport, num_steps in (("shm", 40), ("gloo", 35))
        for num_slots in (1, 2, 13)
    }
    num_taps = dict.fromkeys(RINGS, 0)
    for (transport, _, num_steps), (source, sink) in outcomes_of_cases(cases, 2, timeout_s=200.0).items():
        assert not source.error and not sink.error, (transport, source, sink)
        assert sink.value == num_steps * 100 * NUM_TAPS
        num_taps[transport] += sink.value
    assert min(num_taps.values()) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 3])
def test_the_stress_lets_no_broken_ring_through(num_slots):
    sound = [(transport, None) for transport in RINGS]
    cases = {names: (stress, (*names, num_slots, 5, 100)) for names in (*sound, *MUTANTS)}
    if num_slots == 1:  # each ring has one receive out, and both take turns as the source does
        del cases["gloo", SharedTag]
    outcomes = outcomes_of_cases(cases, 2, timeout_s=120.0)
    assert not any(outcome.error for names in sound for outcome in outcomes.pop(names))
    for names, (source, sink) in outcomes.items():
        assert sink.error in MUTANTS[names], (names, sink)
        assert source.error == "TapPeerLost" or source.value is not None, (names, source)
