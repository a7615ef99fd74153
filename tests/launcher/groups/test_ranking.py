"""The ranking of the jobs of a sweep."""

from __future__ import annotations

import pytest
from sweeps import GROUP, described

from sm_nanogpt.launcher.groups.find import members_among, tries_of
from sm_nanogpt.launcher.groups.ranking import differing_values, ranking


@pytest.mark.parametrize(
    ("losses", "planned", "ranked"),
    [
        (
            [
                described("a", n_layer=1, seed=1, best_loss=2.0),
                described("b", n_layer=1, seed=2, best_loss=3.0),
                described("c", n_layer=2, seed=1, best_loss=2.4),
                described("d", n_layer=2, seed=2),
            ],
            None,
            [({"n_layer": 2}, 2.4, 2), ({"n_layer": 1}, 2.5, 2)],
        ),
        (  # one was not started
            [described("a", n_layer=1, best_loss=2.0), None],
            [{"n_layer": "1"}, {"n_layer": "2"}],
            [({"n_layer": "1"}, 2.0, 1), ({"n_layer": "2"}, float("inf"), 1)],
        ),
    ],
)
def test_the_ranking_is_by_the_mean_over_seeds(losses, planned, ranked):
    ranks = ranking(losses, planned or differing_values(losses))
    assert [(rank.values, rank.mean_loss, rank.n_jobs) for rank in ranks] == ranked


def test_equal_numbers_of_two_types_are_two_configurations():
    jobs = [described("a", best_loss=2.0), described("b", best_loss=3.0)]
    first, second = ranking(jobs, [{"dropout": 0}, {"dropout": 0.0}])
    assert str(first.values) == "{'dropout': 0}"
    assert str(second.values) == "{'dropout': 0.0}"


def test_the_last_try_of_a_member_is_its_newest():
    first = f"{GROUP}-1"
    second_try = f"{GROUP}-1-try2"
    tenth = f"{GROUP}-10"
    other = "sm-nanogpt-20260101-000000-abcde0-1"  # of another sweep
    jobs = [described(id) for id in (other, tenth, second_try, first)]
    tries = tries_of(GROUP, members_among(jobs))
    assert set(tries) == {1, 10}
    assert [job.job_id for job in tries[1]] == [first, second_try]
    assert [job.job_id for job in tries[10]] == [tenth]
