"""The GPU that is not there refuses what a real one would: mixed devices, races between streams,
waits amid a capture. The tests that use it could not fail otherwise.
"""

import threading

import pytest
import torch

from tests.imagined_gpu import _RUN, CPU, GPU, OnGpu, imagined_gpu
from tests.imagined_streams import OrderError


@pytest.fixture
def gpu():
    with imagined_gpu() as made:
        yield made


def test_tensors_on_it_say_so_and_compute_what_a_cpu_does(gpu):
    x = torch.arange(6.0, device="cuda").view(2, 3)
    y = torch.tensor([[1.0, 2.0, 3.0]]).to(GPU)
    z = (x * y).sum(1)
    assert isinstance(z, OnGpu) and z.is_cuda and z.device == GPU
    assert z.cpu().tolist() == [8.0, 26.0] and z.cpu().device == CPU
    assert x.to(GPU) is x and x.to(torch.float32) is x


def test_mixed_devices_are_refused(gpu):
    there, here = torch.ones(4, 2, device="cuda"), torch.ones(4, 2)
    for mix in (
        lambda: there + here,
        lambda: torch.cat([here, there]),
        lambda: there.index_select(0, torch.tensor([1])),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), there),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mix()


def test_gradients_are_on_the_device_of_their_parameters(gpu):
    weight = torch.nn.Parameter(torch.ones(3, 2, device="cuda"))
    rows = weight.index_select(0, torch.tensor([0, 2, 2], device="cuda"))
    rows.sum().backward()
    assert weight.grad.device == GPU
    assert weight.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]


def test_every_look_at_a_value_is_a_wait(gpu):
    x = torch.arange(4, device="cuda")
    before = len(gpu.streams.syncs)
    x.add_(1)
    y = x * 2
    y[1:3] = 0
    assert len(gpu.streams.syncs) == before
    for look in (
        lambda: int(x.sum()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: bool((x > 0).all()),
        lambda: x.nonzero(),
        lambda: x[x > 2],
        torch.cuda.synchronize,
    ):
        before = len(gpu.streams.syncs)
        look()
        assert len(gpu.streams.syncs) > before, look


def test_two_streams_that_touch_the_same_bytes_must_wait(gpu):
    x = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()
    x.add_(1)
    with torch.cuda.stream(side):
        with pytest.raises(OrderError, match="does not wait"):
            x.add_(1)
        side.wait_stream(gpu.streams.default)
        x.add_(1)
    with pytest.raises(OrderError, match="does not wait"):
        x.sum()
    event = side.record_event()
    gpu.streams.default.wait_event(event)
    assert float(x.sum()) == 16.0


def test_other_bytes_of_the_same_storage_and_reading_alike_are_no_race(gpu):
    x, y = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    x[:4].add_(1)
    y.sum()
    with torch.cuda.stream(torch.cuda.Stream()):
        x[4:].add_(1)
        y.sum()
        with pytest.raises(OrderError):
            x[3:].add_(1)
        with pytest.raises(OrderError):
            y.add_(1)


def test_an_event_that_was_never_recorded_cannot_be_waited_for(gpu):
    event = torch.cuda.Event()
    for wait in (event.synchronize, lambda: gpu.streams.default.wait_event(event)):
        with pytest.raises(OrderError, match="never recorded"):
            wait()


def test_pinned_memory_is_copied_without_a_wait_and_must_be_waited_for(gpu):
    x = torch.ones(4, device="cuda")
    pinned = torch.zeros(4, pin_memory=True)
    before = len(gpu.streams.syncs)
    pinned.copy_(x, non_blocking=True)
    assert len(gpu.streams.syncs) == before
    with pytest.raises(OrderError, match="does not wait"):
        pinned.sum()
    torch.cuda.synchronize()
    assert float(pinned.sum()) == 4.0
    x.copy_(pinned, non_blocking=True)
    with pytest.raises(OrderError, match="does not wait"):
        pinned.zero_()


def captured(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = work()
    return graph, out


def test_a_graph_does_nothing_until_it_is_replayed_and_then_reads_what_is_there(gpu):
    x = torch.ones(4, device="cuda")
    total = torch.zeros(4, device="cuda")

    def work():
        doubled = x * 2
        total.add_(doubled)
        return doubled

    graph, doubled = captured(work)
    assert total.tolist() == [0.0] * 4 and doubled.cpu().isnan().all()
    graph.replay()
    assert total.tolist() == doubled.tolist() == [2.0] * 4
    x.fill_(5)
    graph.replay()
    assert total.tolist() == [12.0] * 4 and doubled.tolist() == [10.0] * 4
    assert gpu.streams.num_captures == 1 and graph.num_replays == 2


def test_a_capture_that_would_wait_is_refused(gpu):
    x = torch.ones(4, device="cuda")
    for look in (
        lambda: float(x.sum()),
        lambda: x.cpu(),
        lambda: x.nonzero(),
        lambda: x.copy_(torch.zeros(4)),
        torch.cuda.synchronize,
    ):
        with pytest.raises((OrderError, AssertionError), match="capture"):
            captured(look)
        gpu.streams._thread.graph = None


def test_a_replay_that_does_not_wait_for_its_input_is_a_race(gpu):
    x = torch.ones(4, device="cuda")
    graph, _ = captured(lambda: x * 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(gpu.streams.default)
        x.fill_(3)
    with pytest.raises(OrderError, match="does not wait"):
        graph.replay()


def test_a_thread_of_the_products_has_the_gpu_too_and_its_own_stream(gpu):
    found = []

    def work():
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.cuda.current_stream().wait_stream(gpu.streams.default)
        found.append(torch.arange(3, device="cuda") + 1)
        found.append(torch.cuda.current_stream())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].device == GPU and found[1] is not torch.cuda.current_stream()


def test_nothing_is_left_of_it_behind_the_block():
    names = ("is_available", "Stream", "Event", "CUDAGraph", "current_stream", "synchronize")
    before = [getattr(torch.cuda, name) for name in names]
    with imagined_gpu():
        x = torch.ones(1)
        assert torch.cuda.is_available() and x.to("cuda").is_cuda
    assert [getattr(torch.cuda, name) for name in names] == before
    assert not isinstance(x + 1, OnGpu) and threading.Thread.run is _RUN
