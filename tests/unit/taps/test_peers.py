"""The watch over a group's processes: children that stand for ranks, one of them on another host."""

import gc
import os
import signal
import subprocess
import time
from datetime import timedelta

import pytest
from torch import distributed as dist

from hf_codraft.taps import peers as peers_module
from hf_codraft.taps.peers import PeerLost, Peers, host_identity
from hf_codraft.taps.protocol import TapPeerLost

OF_GLOO = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


@pytest.fixture
def children(monkeypatch):
    """Processes that stand for ranks 1 and 2 of four; this is rank 0, and rank 3 is elsewhere."""
    processes = [subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) for _ in range(2)]
    here = host_identity()
    places = [(here, os.getpid()), *((here, process.pid) for process in processes), (("another", "host"), os.getpid())]
    monkeypatch.setattr(peers_module, "gather_objects", lambda value, group: places)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield processes
    dist.destroy_process_group()
    for process in processes:
        process.kill()
        process.communicate()


def wait_until(is_so):
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def end(process):
    """Kills a child, which nobody reaps, and waits until its pipe has closed: the first that others see of it."""
    process.kill()
    assert process.stdout.read() == b""


def open_files():
    return set(os.listdir("/proc/self/fd"))


def test_ended_stopped_and_unseen_ranks(children):
    peers = Peers(dist.group.WORLD)
    assert (peers.ended(), peers.stopped(), peers.unseen, peers.culprits()) == ([], [], [3], "")
    children[1].send_signal(signal.SIGSTOP)
    wait_until(peers.stopped)
    assert (peers.ended(), peers.stopped()) == ([], [2])
    are_stopped = "rank(s) [2] are stopped, by a signal or a debugger"
    assert peers.culprits() == are_stopped
    end(children[0])
    assert peers.culprits() == f"{are_stopped}; rank(s) [1] ended, killed or with an error that their own output shows"
    children[1].send_signal(signal.SIGCONT)
    wait_until(lambda: not peers.stopped())
    assert peers.culprits() == "rank(s) [1] ended, killed or with an error that their own output shows"
    wait_until(peers.ended)
    assert (peers.ended(), peers.stopped()) == ([1], [])
    children[0].wait()  # reaped: its number may go to another process
    assert peers.ended() == [1]


def test_a_killed_process_is_known_as_soon_as_its_connections_are_closed():
    for _ in range(40):
        process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
        end(process)
        assert peers_module._state(process.pid)[1] & peers_module._PF_EXITING
        process.communicate()
    assert not peers_module._state(os.getpid())[1] & peers_module._PF_EXITING


def test_a_process_whose_name_looks_like_a_state_is_not_taken_for_a_stopped_one():
    script = 'printf "a) T 4 4 4 (b" > /proc/$$/comm; echo renamed; read line'
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"renamed\n"
    letter, flags = peers_module._state(process.pid)
    assert letter in "RS" and not flags & peers_module._PF_EXITING
    process.communicate(b"\n")
    assert peers_module._state(process.pid) == ("", 0)


def test_naming_says_who_was_lost(children):
    peers = Peers(dist.group.WORLD)
    end(children[0])
    for kind in (RuntimeError, dist.DistBackendError):
        error = kind(OF_GLOO)
        with pytest.raises(PeerLost) as raised, peers.naming("a step"):
            raise error
        assert str(raised.value) == (
            "rank 0 lost the others in a step: rank(s) [1] ended, killed or with an error that their own output shows. "
            f"torch says: {OF_GLOO}"
        )
        assert raised.value.__cause__ is error


def test_naming_says_that_it_does_not_know(children, monkeypatch):
    monkeypatch.setattr(peers_module, "_PATIENCE_S", 0.0)
    peers = Peers(dist.group.WORLD)
    unseen = "[3]"
    for _ in range(2):
        with pytest.raises(PeerLost) as raised, peers.naming("a step"):
            raise RuntimeError(OF_GLOO)
        said = f"no process ended or is stopped, except rank(s) {unseen}, which can't be seen from here; so one of them hangs"
        assert said in str(raised.value)
        peers.close()  # whoever no longer looks must not say that it saw nothing
        unseen = "[1, 2, 3]"


@pytest.mark.parametrize(
    "error",
    [ValueError(OF_GLOO), RuntimeError("mat1 and mat2 shapes can't be multiplied"), TapPeerLost(OF_GLOO)],
    ids=lambda error: type(error).__name__,
)
def test_naming_leaves_errors_that_are_not_the_backends_alone(children, error):
    peers = Peers(dist.group.WORLD)
    end(children[0])
    with pytest.raises(type(error)) as raised, peers.naming("a step"):
        raise error
    assert raised.value is error


def test_watches_that_are_closed_or_dropped_leave_no_file_open(children):
    gc.collect()
    before = open_files()
    peers = Peers(dist.group.WORLD)
    assert len(open_files() - before) == 2
    peers.close()
    end(children[0])
    assert (open_files(), peers.ended(), peers.stopped()) == (before, [], [])
    peers.close()
    for _ in range(20):
        peers = Peers(dist.group.WORLD)
    del peers
    gc.collect()
    assert open_files() == before


def test_a_forked_process_that_ends_does_not_end_the_watch(children):
    peers = Peers(dist.group.WORLD)
    child = os.fork()
    if child == 0:
        peers.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    end(children[1])
    wait_until(peers.ended)
    assert peers.ended() == [2]
    assert not peers._finalizer.atexit  # files that other code opened under these numbers stay open
