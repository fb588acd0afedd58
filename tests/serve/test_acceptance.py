"""One answer's acceptance, with the numbers that hand calculation gives."""

from __future__ import annotations

from peagle_jax.serve.acceptance import RequestAcceptance


def test_rounds_that_accept_none_some_and_all():
    acceptance = RequestAcceptance(3)
    acceptance.add(0, 0)  # the prompt's own token: nothing was drafted
    for accepted in (0, 2, 3):
        acceptance.add(accepted, 3)
    report = acceptance.report("summary")
    assert round(report["mean_acceptance_length"], 2) == 2.67
    assert report["draft_acceptance_rate"] == 5 / 9
    assert report["acceptance_histogram"] == [1, 0, 1, 1]
    assert (report["num_spec_steps"], report["num_accepted_draft_tokens"], report["num_draft_tokens"]) == (
        3,
        5,
        9,
    )
    assert "per_step_accepted" not in report


def test_drafts_of_changing_length_are_told_apart():
    acceptance = RequestAcceptance(4)
    for accepted, drafted in ((4, 4), (1, 2), (2, 2)):
        acceptance.add(accepted, drafted)
    report = acceptance.report("detailed")
    assert report["acceptance_histogram"] == [0, 1, 1, 0, 1]
    assert report["acceptance_histogram_by_draft_length"] == {"2": [0, 1, 1], "4": [0, 0, 0, 0, 1]}
    assert (report["per_step_accepted"], report["per_step_drafted"]) == ([4, 1, 2], [4, 2, 2])


def test_an_answer_without_drafts_has_length_one():
    report = RequestAcceptance(3).report("summary")
    assert (report["mean_acceptance_length"], report["draft_acceptance_rate"]) == (1.0, 0.0)
    assert report["acceptance_histogram"] == [0, 0, 0, 0]
