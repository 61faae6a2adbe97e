"""deploy/kubernetes/zl.yaml against the API's own schemas, and against what zl needs of it.

The schemas are those of Kubernetes releases, from the package kubernetes-validate: unknown and misspelt fields fail.
"""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "zl.yaml"
RELEASES = ("1.31", "1.35")


@pytest.fixture(scope="module")
def objects():
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def one(objects, kind, name="zl"):
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_each_object_fits_the_schema_of_its_kind(objects, release):
    assert len(objects) == 7
    for each in objects:
        kubernetes_validate.validate(each, release, strict=True)


def test_the_schema_finds_what_is_wrong(objects):
    pod = one(objects, "Deployment")
    for spoil in (
        lambda spec: spec["template"]["spec"]["containers"][0].update(readinesProbe={}),
        lambda spec: spec["template"]["spec"].update(terminationGracePeriodSeconds="long"),
        lambda spec: spec.pop("selector"),
    ):
        wrong = copy.deepcopy(pod)
        spoil(wrong["spec"])
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, RELEASES[0], strict=True)


def test_a_pod_has_the_time_that_its_drain_takes(objects):
    spec = one(objects, "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    settings = tomllib.loads(one(objects, "ConfigMap")["data"]["zl.toml"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert settings["server"]["drain_s"] + pause + 10 <= spec["terminationGracePeriodSeconds"]


def test_probes_and_ports_are_those_of_the_settings(objects, tmp_path):
    from zl.config import load

    (tmp_path / "zl.toml").write_text(one(objects, "ConfigMap")["data"]["zl.toml"])
    settings = load({}, file=tmp_path / "zl.toml", environ={})
    (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert settings.listen == (f"tcp:0.0.0.0:{ports['zl']}",)
    assert settings.metrics == f"0.0.0.0:{ports['metrics']}"
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    for name in ("readinessProbe", "startupProbe"):
        assert container[name]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    for name in ("zl", "zl-pods"):
        targets = {each["targetPort"] for each in one(objects, "Service", name)["spec"]["ports"]}
        assert targets <= set(ports)


def test_selectors_meet_the_labels(objects):
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(objects, "Service")["spec"]["selector"],
        one(objects, "Service", "zl-pods")["spec"]["selector"],
    ):
        assert selector.items() <= labels.items()
