"""Every check of every lab is checked: right scripts pass, wrong ones are told their mistake."""

import re

import pytest
from cases import Case, cases, verdict

from microddp.labs.engine.catalogue import LABS

CASES = [case for lab in LABS for case in cases(lab)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_script_is_told_what_is_wrong_with_it(case: Case, tmp_path):
    said = verdict(case, tmp_path)
    if case.says is None:
        assert said == ""
    else:
        assert re.search(case.says, " ".join(said.split())), said
