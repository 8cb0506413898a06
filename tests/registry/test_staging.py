"""Mirrors in turn, owned until their copy is done; streams that wait for each other."""

import threading

import pytest
import torch

from compile_backend.registry.arena import Arena
from compile_backend.registry.staging import StagingRing
from compile_backend.registry.stream_order import (
    HostEvent,
    StreamOrder,
    current_stream,
    make_event,
    stream_order,
)

CPU = torch.device("cpu")
WAIT_S = 30  # for another thread, before a test fails


class FlagEvent(HostEvent):
    """An event that passes when the test says so, as a copy in flight does in its own time."""

    def __init__(self):
        self.passed = threading.Event()
        self.passed.set()  # nothing is recorded yet

    def record(self, stream):
        self.passed.clear()

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        assert self.passed.wait(WAIT_S)


def flag_ring(max_mirrors):
    events = []

    def make_flag():
        events.append(FlagEvent())
        return events[-1]

    return StagingRing(lambda: Arena(CPU), make_flag, max_mirrors=max_mirrors), events


def send(ring):
    """Borrow a mirror and leave a copy from it in flight."""
    with ring.borrow() as mirror:
        mirror.mark_in_flight(None)
    return mirror


def test_on_the_host_one_mirror_serves_every_fill():
    ring = StagingRing(lambda: Arena(CPU), lambda: make_event(CPU))
    assert len({send(ring) for _ in range(5)}) == len(ring) == 1


def test_a_mirror_in_flight_is_left_alone_and_comes_back_in_turn():
    ring, events = flag_ring(3)
    first, second = send(ring), send(ring)
    assert first is not second
    events[0].passed.set()
    assert send(ring) is first
    events[0].passed.set()
    events[1].passed.set()
    assert [send(ring), send(ring)] == [second, first]
    assert len(ring) == 2


def test_a_mirror_that_is_held_is_not_handed_out():
    ring, _ = flag_ring(3)
    with ring.borrow() as one, ring.borrow() as other:
        assert one is not other
    with ring.borrow() as again:
        assert again in (one, other)
    assert len(ring) == 2


def test_a_full_ring_waits_for_its_oldest_copy():
    ring, events = flag_ring(2)
    first, second = send(ring), send(ring)
    got, is_waiting = [], threading.Event()

    def borrow():
        is_waiting.set()
        with ring.borrow() as mirror:
            got.append((mirror, events[0].query(), events[1].query()))

    thread = threading.Thread(target=borrow)
    thread.start()
    assert is_waiting.wait(WAIT_S)
    thread.join(0.05)
    assert not got  # both are in flight
    events[0].passed.set()
    thread.join(WAIT_S)
    assert got == [(first, True, False)]
    assert second is not first


def test_a_full_ring_waits_for_another_thread_to_give_one_back():
    ring, _ = flag_ring(1)
    got = []
    with ring.borrow() as mirror:
        thread = threading.Thread(target=lambda: got.append(send(ring)))
        thread.start()
        thread.join(0.05)
        assert not got
    thread.join(WAIT_S)
    assert got == [mirror]


def test_a_mirror_whose_user_failed_is_free_again():
    ring, _ = flag_ring(1)
    with pytest.raises(ZeroDivisionError), ring.borrow() as first:
        1 / 0
    assert send(ring) is first


@pytest.mark.parametrize("max_mirrors", [1, 2, 3])
def test_no_mirror_is_written_while_its_copy_reads(max_mirrors):
    """Several threads write, a device of one thread reads late; every copy sees its own value."""
    ring, _ = flag_ring(max_mirrors)
    copies, lock, done = [], threading.Lock(), threading.Event()
    seen = []

    def device():
        while not (done.is_set() and not copies):
            with lock:
                copy = copies.pop(0) if copies else None
            if copy is None:
                continue
            cell, value, event = copy
            seen.append((cell[0], value))
            event.passed.set()

    def fill(thread):
        for step in range(50):
            with ring.borrow() as mirror:
                cell = mirror.__dict__.setdefault("cell", [None])
                cell[0] = (thread, step)
                mirror.mark_in_flight(None)
                with lock:
                    copies.append((cell, (thread, step), mirror._event))

    reader = threading.Thread(target=device)
    writers = [threading.Thread(target=fill, args=(number,)) for number in range(3)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(WAIT_S)
    done.set()
    reader.join(WAIT_S)
    assert len(seen) == 150
    assert all(found == wanted for found, wanted in seen)


# --- streams -----------------------------------------------------------------------------------


class Stream:
    """A list of what it was given; an event is a place in one."""

    def __init__(self):
        self.work = []

    def wait_event(self, event):
        self.work.append(("after", *event.place))


class PlaceEvent(HostEvent):
    def record(self, stream):
        self.place = (stream, len(stream.work))


def test_a_fill_on_the_same_stream_waits_for_nothing():
    order, stream = StreamOrder(PlaceEvent()), Stream()
    for _ in range(2):
        order.begin_fill(stream)
        order.after_copy_out(stream)
    assert stream.work == []


def test_a_fill_on_another_stream_waits_for_the_copy_out_and_no_more():
    order, one, other = StreamOrder(PlaceEvent()), Stream(), Stream()
    order.begin_fill(one)
    one.work += ["fill", "replay", "copy out"]
    order.after_copy_out(one)
    one.work.append("something else")
    order.begin_fill(other)
    assert other.work == [("after", one, 3)]
    other.work.append("fill")
    order.begin_fill(one)  # no copy-out since: after all of the other's work
    assert one.work[-1] == ("after", other, 2)
    order.begin_fill(one)
    assert len(one.work) == 5


def test_the_host_has_no_streams_to_order():
    order = stream_order(CPU)
    assert order is stream_order(CPU)
    assert current_stream(CPU) is None
    order.begin_fill(None)
    order.after_copy_out(None)
    assert order._last_stream is None
