"""The YAML files of examples/launch are YAML, and say what the tests of their commands run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.support.launching import LAUNCH, ROOT


def parsed(name: str) -> dict[str, Any]:
    pytest.importorskip("yaml")
    return import_module("yaml").safe_load((ROOT / LAUNCH / name).read_text())


def test_the_trainjob_starts_torchrun_with_a_rank_for_each_gpu() -> None:
    job = parsed("kubernetes_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", f"{LAUNCH}/train.py", "--steps", "10"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["numNodes"] == 2


def test_skypilot_copies_the_checkout_and_runs_the_program_on_two_nodes() -> None:
    job = parsed("skypilot.yaml")
    assert job.keys() == {"name", "workdir", "num_nodes", "resources", "setup", "run"}
    assert (job["workdir"], job["num_nodes"]) == (".", 2)
    text = (ROOT / LAUNCH / "skypilot.yaml").read_text().partition("\nrun: |\n")[2]
    assert job["run"].split() == text.split()
    assert job["run"].split()[-3:] == [f"{LAUNCH}/train.py", "--steps", "10"]
