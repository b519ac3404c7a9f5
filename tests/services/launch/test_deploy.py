"""The files under deploy/: what can be checked of them without the systems that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.config import ServeConfig, load_config
from services.environment import read_environment
from services.resources import plan_remote_instances

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def check(file: Path) -> ServeConfig:
    config = load_config({}, file, read_environment({"PAGEFERRY_CLUSTER_TOKEN": "x" * 16}))
    plans = plan_remote_instances(config)
    assert len(plans) == len(config.instances)
    return config


def test_the_example_configuration_is_accepted() -> None:
    assert check(DEPLOY / "cluster.yaml").ray_address == "auto"


def test_the_kubernetes_objects_hold_an_accepted_configuration(tmp_path: Path) -> None:
    objects = {
        entry["kind"]: entry for entry in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    }
    assert set(objects) == {"ConfigMap", "RayJob", "Service"}
    file = tmp_path / "cluster.yaml"
    file.write_text(objects["ConfigMap"]["data"]["cluster.yaml"])
    config = check(file)
    spec = objects["RayJob"]["spec"]
    assert spec["entrypoint"] == "pageferry serve --config /etc/pageferry/cluster.yaml"
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["ports"][0]["containerPort"] == config.port
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == config.port


def test_the_container_holds_every_package() -> None:
    copied = (DEPLOY / "Dockerfile").read_text()
    for package in ("kvcache_core", "transfer", "worker", "router", "services"):
        assert f"COPY {package} " in copied


@pytest.mark.parametrize("name", ["cluster.yaml", "ray-cluster.yaml", "kuberay.yaml"])
def test_every_file_is_yaml(name: str) -> None:
    assert list(yaml.safe_load_all((DEPLOY / name).read_text()))
