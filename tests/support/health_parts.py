"""What the tests of check_health share."""

import dataclasses

from scripts.health.run_check import find_subject


def subject_of(paths, **changes):
    found = find_subject(paths, timeout_s=5.0, recent_s=60.0)
    return dataclasses.replace(found, **changes)


def verdicts(findings):
    return [finding.verdict for finding in findings]
