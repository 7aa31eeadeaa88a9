"""Four ranks of each backend, as tests/integration/test_backends.py has two and three; and compiled networks."""

from dataclasses import replace

import pytest
import torch

from tasks.collectives.reducer import Reducer
from tests.builders.rank_cases import BACKENDS, CASES, COMPILED, NORMED, run_case, start_ranks

NUM_RANKS = 4


@pytest.mark.timeout(900)
def test_four_ranks_equal_one_process(tmp_path) -> None:
    """With none to five rows per rank and step, weights and errors are those of one process, on both backends."""
    trained = start_ranks(NUM_RANKS, tmp_path / "ranks")
    for name, case in CASES.items():
        expected = run_case(replace(case, interrupt_at=None), Reducer(), NUM_RANKS, tmp_path / f"alone-{name}")
        for backend in BACKENDS:
            for results in trained[backend]:
                assert results[name].get("message") == expected.get("message"), (name, backend)
                torch.testing.assert_close(
                    results[name].get("state", {}), expected.get("state", {}), rtol=1e-9, atol=1e-11
                )
                elsewhere = results["resumed_elsewhere"]["state"]
                torch.testing.assert_close(elsewhere, results["plain"]["state"], rtol=1e-9, atol=1e-11)


@pytest.mark.timeout(900)
def test_compiled_ranks_equal_one_uncompiled_process(tmp_path) -> None:
    """Clipped, accumulated, averaged, unfrozen, resumed and diverged: `train.compile` changes only the rounding."""
    trained = start_ranks(2, tmp_path / "ranks", [*COMPILED, *NORMED])
    for name, case in COMPILED.items():
        uncompiled = replace(case, is_compiled=False, interrupt_at=None)
        expected = run_case(uncompiled, Reducer(), 2, tmp_path / f"alone-{name}")
        for backend in BACKENDS:
            for results in trained[backend]:
                assert results[name].get("message") == expected.get("message"), (name, backend)
                torch.testing.assert_close(
                    results[name].get("state", {}), expected.get("state", {}), rtol=1e-9, atol=1e-11
                )
    for backend in BACKENDS:
        for results in trained[backend]:
            expected = results["normed"]["state"]
            torch.testing.assert_close(results["normed_compiled"]["state"], expected, rtol=1e-9, atol=1e-11)
