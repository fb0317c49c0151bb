"""What ``--device`` comes to: GPUs that can be used and are not shared, a CPU, or a refusal that names the choices."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from services.worker.config import WorkerConfig
from services.worker.device_choice import Asked, DeviceChoice, choose_device
from services.worker.torch_gpus import TorchGpus, choose
from shared.errors import ConfigError


@dataclass
class StandIn:
    """GPUs of which some are broken."""

    count: int = 0
    absence: str = "the driver is too old"
    are_installed: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    mig_instances: int = 0

    def uuid(self, index: int) -> str:
        return f"uuid-{index}"

    def name(self, index: int) -> str:
        return f"H{index}"

    def fault(self, index: int) -> str:
        self.tried.append(index)
        return self.faults.get(index, "")


def test_auto_takes_a_gpu_that_computes() -> None:
    """The first one, once it was tried."""
    gpus = StandIn(count=1)

    assert choose_device("auto", gpus) == DeviceChoice("cuda", 0, "H0", uuids=("uuid-0",))
    assert gpus.tried == [0]


def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    """There is nothing to say about it."""
    assert choose_device("auto", StandIn()) == DeviceChoice("cpu")


def test_a_gpu_that_cannot_be_used_is_said() -> None:
    """Whether torch does not see it, or computing on it fails."""
    unseen = choose_device("auto", StandIn(are_installed=True))
    broken = choose_device("auto", StandIn(count=1, faults={0: "out of memory"}))

    assert unseen == DeviceChoice("cpu", note="a GPU is there but cannot be used: the driver is too old")
    assert broken == DeviceChoice("cpu", note="GPU 0 (H0) is there but cannot be used: out of memory")


def test_cuda_without_a_usable_gpu_is_refused() -> None:
    """With the reason, and what else there is."""
    with pytest.raises(ConfigError, match=r"--device cuda: no usable GPU: the driver is too old; choose --device cpu"):
        choose_device("cuda", StandIn(are_installed=True))
    with pytest.raises(ConfigError, match=r"GPU 0 \(H0\) cannot be used: broken; choose --device cpu"):
        choose_device("cuda", StandIn(count=1, faults={0: "broken"}))


def test_the_cpu_is_taken_without_a_look_at_gpus() -> None:
    """Nothing is put on a GPU that nobody asked for."""
    gpus = StandIn(count=4)

    assert choose_device("cpu", gpus, workers=9) == DeviceChoice("cpu")
    assert gpus.tried == []


def test_each_worker_has_gpus_of_its_own() -> None:
    """Worker 1 of two with two ranks each takes the third and the fourth."""
    gpus = StandIn(count=4)

    groups = [choose_device("cuda", gpus, first_gpu=first, ranks=2, workers=2) for first in (0, 2)]

    assert [group.device for group in groups] == ["cuda:0", "cuda:2"]
    assert [group.uuids for group in groups] == [("uuid-0", "uuid-1"), ("uuid-2", "uuid-3")]
    assert gpus.tried == [0, 1, 2, 3]


def test_instances_of_one_gpu_are_workers_of_several_cells() -> None:
    """CUDA shows a process one MIG instance; what to do with the others is said. One worker on one is fine."""
    gpus = StandIn(count=1, mig_instances=2)

    with pytest.raises(ConfigError, match=r"names 2 MIG instances.*one worker for each.*thermocline router"):
        choose_device("cuda", gpus, workers=2)
    assert choose_device("cuda", gpus).uuids == ("uuid-0",)


def test_instances_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have names of their own there, beside numbers and UUIDs of whole GPUs, which CUDA understands itself."""
    found, named = [], ""
    for visible in ("MIG-4f1b2c, MIG-77aa0e", "GPU-4f1b2c,GPU-77aa0e", "1,0", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(TorchGpus().mig_instances)
        named = named or TorchGpus().uuid(0)

    assert found == [2, 0, 0, 0]
    assert named == "MIG-4f1b2c"


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_workers_never_share_a_gpu(asked: Asked) -> None:
    """Too few for all is refused at the first worker already, with every way out."""
    with pytest.raises(
        ConfigError, match=r"--workers 2 need 2 GPUs.*sees 1 GPU here: choose fewer --workers, --device cpu"
    ):
        choose_device(asked, StandIn(count=1), first_gpu=0, workers=2)
    with pytest.raises(ConfigError, match=r"--workers 2 with --tensor-parallel 2 need 4 GPUs.*CUDA_VISIBLE_DEVICES"):
        choose_device(asked, StandIn(count=3), ranks=2, workers=2)
    with pytest.raises(ConfigError, match="--tensor-parallel 2 needs 2 GPUs"):
        choose_device(asked, StandIn(count=1), ranks=2)
    with pytest.raises(ConfigError, match="--gpu 3: torch sees 2 GPUs"):
        choose_device(asked, StandIn(count=2), first_gpu=3)


def test_of_several_workers_none_falls_back_alone() -> None:
    """A cell whose second GPU is broken is refused, not half on a CPU."""
    with pytest.raises(ConfigError, match=r"--device auto: GPU 1 \(H1\) cannot be used: broken"):
        choose_device("auto", StandIn(count=2, faults={1: "broken"}), first_gpu=1, workers=2)


@pytest.mark.skipif(TorchGpus().count > 0, reason="there is a GPU")
def test_torch_says_why_it_has_none() -> None:
    """It is built without CUDA, or what the driver says."""
    gpus = TorchGpus()

    assert gpus.absence
    assert choose_device("auto", gpus).kind == "cpu"
    assert gpus.fault(0)


def test_the_settings_of_a_worker_make_the_choice() -> None:
    """Its GPU, its ranks and the workers beside it."""
    config = WorkerConfig(model="m", gpu=2, node_workers=2, tensor_parallel=2)

    assert choose(config, StandIn(count=4)).device == "cuda:2"
    with pytest.raises(ConfigError, match="--workers 2 with --tensor-parallel 2 need 4 GPUs"):
        choose(config, StandIn(count=3))
    assert choose(WorkerConfig(model="m", forward="fused"), StandIn(count=1)).kind == "cuda"


def test_exact_mode_is_for_one_gpu() -> None:
    """Where there is none, or several share a model, it is refused with the reason."""
    exact = WorkerConfig(model="m", exact=True)

    assert choose(exact, StandIn(count=1)).kind == "cuda"
    with pytest.raises(ConfigError, match=r"--exact: its kernels are for GPUs.*the driver is too old"):
        choose(exact, StandIn(are_installed=True))
    with pytest.raises(ConfigError, match="--attention flashinfer: on a GPU only"):
        choose(WorkerConfig(model="m", attention="flashinfer"), StandIn())
    with pytest.raises(ValueError, match="--exact: its kernels are for GPUs"):
        WorkerConfig(model="m", exact=True, device="cpu")
    with pytest.raises(ValueError, match="--exact: not with --tensor-parallel"):
        WorkerConfig(model="m", exact=True, tensor_parallel=2)
    with pytest.raises(ValueError, match="--exact: not with --forward fused"):
        WorkerConfig(model="m", exact=True, forward="fused")


def test_the_data_type_on_a_cpu_may_be_another() -> None:
    """``--cpu-dtype`` stands in for auto there, and only there."""
    config = WorkerConfig(model="m", cpu_dtype="float32")

    assert (config.dtype_on("cpu"), config.dtype_on("cuda")) == ("float32", "auto")
    assert WorkerConfig(model="m", dtype="bfloat16", cpu_dtype="float32").dtype_on("cpu") == "bfloat16"
