"""The table of instance families."""

from __future__ import annotations

import re

import pytest

from sm_nanogpt.launcher import instances, limits


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ("g4dn g5 g6 g6e g6f g7 g7e p3dn p4d p4de p5 p5e p5en p6-b200 p6-b300", True),
        ("m5d m6gd m8id r5d", True),
        ("p2 p3 t3 m5 c5 c5n r5 m6i m7i-flex c8i m8i r8i r8i-flex", False),
    ],
)
def test_the_instances_with_local_disks_are_known(families, expected):
    for family in families.split():
        assert instances.has_local_disks(f"ml.{family}.48xlarge") == expected, family


def test_each_type_is_known_to_have_gpus_or_not():
    assert instances.describe_instance("ml.g5.12xlarge") == "ml.g5.12xlarge: 4 A10G"
    assert instances.describe_instance("ml.c8i.96xlarge") == "ml.c8i.96xlarge: no GPU"
    for name, family in instances.FAMILIES.items():
        sizes = {*family.gpu_counts, *family.prices}
        in_boto3 = {type for type in limits.instance_types() if type.startswith(f"ml.{name}.")}
        if in_boto3:  # else the family is newer
            assert {f"ml.{name}.{size}" for size in sizes} <= in_boto3
    for name in limits.instance_types():
        if instances.instance_problem([name]):
            assert name.startswith(("ml.trn", "ml.p2.", "ml.p6e-gb200."))
        else:
            assert instances.looks_like_gpu(name) == bool(instances.count_gpus(name)), name


def test_a_family_with_prices_says_when_they_were_looked_up():
    """A plan that no price list was asked for shows the month."""
    for name, family in instances.FAMILIES.items():
        month = r"20\d\d-\d\d" if family.prices else ""
        assert re.fullmatch(month, family.priced), f"{name}: give `priced`, the month of its prices"


def test_a_family_newer_than_boto3_needs_its_row_alone(monkeypatch):
    gpus = instances.Family(instances.B300, {"144xlarge": 16})
    cpus = instances.Family(prices={"5xlarge": 1.0})
    families = {**instances.FAMILIES, "p9": gpus, "c19": cpus}
    monkeypatch.setattr(instances, "FAMILIES", families)
    assert instances.instance_problem(["ml.p9.144xlarge"]) == ""
    assert instances.describe_instance("ml.p9.144xlarge") == "ml.p9.144xlarge: 16 B300"
    assert instances.instance_problem(["ml.c19.5xlarge"]) == ""
    assert instances.describe_instance("ml.c19.5xlarge") == "ml.c19.5xlarge: no GPU"
    assert "mean ml.p9.144xlarge" in instances.instance_problem(["ml.p9.14xlarge"])
