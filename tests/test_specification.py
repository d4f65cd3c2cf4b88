"""The clauses of docs/specification.md, and who cites them."""

import re

from conftest import ROOT

from conformance.cases import all_cases
from reference import SPECIFICATION_VERSION

TEXT = (ROOT / "docs" / "specification.md").read_text()
CLAUSES = {m[1]: m[2] for m in re.finditer(r"^\*\*(C\d+)\. (.*?)(?=^\*\*C\d+\. |^## |\Z)", TEXT, re.M | re.S)}
CITED = {clause for case in all_cases().values() for clause in case.clauses}


def test_it_names_the_version_that_reports_name():
    assert TEXT.startswith(f"# The specification\n\nVersion {SPECIFICATION_VERSION}.\n")


def test_every_cited_clause_exists():
    assert CLAUSES
    assert not CITED - set(CLAUSES)


def test_a_clause_that_no_case_cites_says_so():
    uncited = set(CLAUSES) - CITED
    marked = {name for name, text in CLAUSES.items() if "*Oracle only.*" in text}
    assert uncited == marked


def test_the_oracle_cites_clauses_that_exist():
    for path in sorted((ROOT / "reference").glob("*.py")):
        for first, last in re.findall(r"\bC(\d+)(?:-C?(\d+))?\b", path.read_text()):
            assert {f"C{first}", f"C{last or first}"} <= set(CLAUSES), f"{path.name}: C{first}"
