"""A Ray that does not come up is one clear error, whatever type Ray raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from services.errors import StartError
from services.launch import RayHost, RaySettings
from services.resources import InstancePlan
from transfer.identity import Incarnation
from worker.config import WorkerConfig


def settings(address: str | None) -> RaySettings:
    return RaySettings(
        address=address, cluster_name="test", startup_timeout_s=1.0, worker_environment={}
    )


def no_config(plan: InstancePlan, incarnation: Incarnation, host: str) -> WorkerConfig:
    raise AssertionError("nothing is started")


@pytest.mark.parametrize(
    "raised",
    # Ray raises the bare type when its own processes are not up in time.
    [Exception("The current node timed out during startup."), RuntimeError("no"), OSError("no")],
)
@pytest.mark.parametrize(
    ("address", "message"),
    [(None, "cannot be started on this machine"), ("10.0.0.1:6379", "cannot be joined")],
)
def test_whatever_ray_raises_is_a_start_error(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, address: str | None, message: str
) -> None:
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", fail)
    before = set(Path("/tmp").glob("pageferry-ray-*"))
    with pytest.raises(StartError, match=message) as caught:
        RayHost.open(settings(address), no_config)
    assert caught.value.__cause__ is raised
    assert set(Path("/tmp").glob("pageferry-ray-*")) <= before


def test_an_interrupt_while_ray_starts_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RayHost.open(settings(None), no_config)


def test_nothing_stays_on_disk_even_when_ray_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ray, "init", lambda **_: None)
    before = set(Path("/tmp").glob("pageferry-ray-*"))
    host = RayHost.open(settings(None), no_config)
    made = set(Path("/tmp").glob("pageferry-ray-*")) - before
    assert made
    monkeypatch.setattr(ray, "shutdown", fail)
    with pytest.raises(RuntimeError, match="no"):
        host.close()
    assert not {folder for folder in made if folder.exists()}
