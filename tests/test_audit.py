"""Known vulnerabilities of what is installed: `make test-all` asks the advisory service, where it can be asked."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

COMMAND = (sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--format", "json", "--desc", "off")
COMMAND += ("--progress-spinner", "off", "--timeout", "15")
SECONDS = 600.0
OFFLINE = ("ConnectionError", "Max retries exceeded", "Connection refused", "ServiceError", "timed out", "HTTPError")
"""What pip-audit says where its service cannot be asked."""


def found(report: dict[str, Any]) -> list[str]:
    """Each vulnerability that a newer version mends: package, version, advisory, and the version to take."""
    return [
        f"{package['name']} {package['version']}: {known['id']}, mended in {', '.join(known['fix_versions'])}"
        for package in report["dependencies"]
        for known in package.get("vulns", [])
        if known["fix_versions"]
    ]


def unasked(report: dict[str, Any]) -> str | None:
    """Why a report without vulnerabilities says nothing: the service knew hardly any package (a mirror's index)."""
    packages = report["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    if 2 * len(skipped) <= len(packages):
        return None
    reason = skipped[0]["skip_reason"] if skipped else "no package was looked at"
    return f"{len(skipped)} of {len(packages)} packages could not be looked up: {reason}"


@pytest.mark.slow
def test_nothing_that_is_installed_is_known_to_be_vulnerable() -> None:
    if importlib.util.find_spec("pip_audit") is None:
        pytest.skip("pip-audit is not installed: pip install -e .[dev]")
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the advisory service did not answer within {SECONDS:g} s")
    if not done.stdout.startswith("{"):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if any(word in done.stderr for word in OFFLINE):
            pytest.skip(f"the advisory service cannot be asked: {last}")
        pytest.fail(f"pip-audit ended with status {done.returncode}: {last}")
    report = json.loads(done.stdout)
    assert not (vulnerable := found(report)), "\n".join(vulnerable)
    if (why := unasked(report)) is not None:
        pytest.skip(why)


@pytest.mark.slow
def test_installed_versions_go_together() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout


def test_a_report_is_read() -> None:
    advisory = {"id": "CVE-2025-1", "fix_versions": ["2.0"]}
    bad = {"name": "a", "version": "1.0", "vulns": [advisory, {"id": "CVE-2025-2", "fix_versions": []}]}
    good, unknown = {"name": "b", "version": "1", "vulns": []}, {"name": "c", "skip_reason": "not found"}
    assert found({"dependencies": [bad, good, unknown]}) == ["a 1.0: CVE-2025-1, mended in 2.0"]
    assert unasked({"dependencies": [bad, good, unknown]}) is None
    assert "not found" in str(unasked({"dependencies": [good, unknown, unknown]}))
