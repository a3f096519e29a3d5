"""What plans of `run --dry-run` say, and leave out."""

from support.command import run, said


def test_a_dry_run_on_the_cpu_says_nothing_of_copies():
    plan = run("run", "--size", 10**5, "--device", "cpu", "--dry-run", check=0).stdout
    assert "moved" not in plan and " 0 bytes" not in plan and "2000000.000" not in plan
    assert "they do not fit" in plan
    ranks = run("run", "--size", 10**5, "--device", "cpu", "--dry-run", "--ranks", 64, check=0)
    assert "fit" not in ranks.stdout and "111.76 GiB, in parts over the ranks" in ranks.stdout


def test_a_plan_of_the_critical_reduction_names_no_owners_of_c():
    given = "run", "--size", 8, "--device", "cpu", "--threads", 2, "--split", "cols", "--dry-run"
    ordered, critical = said(*given), said(*given, "--reduce", "critical")
    assert "finishes C" in ordered and "sums partials of" in ordered
    assert "finishes C" not in critical and "sums partials of" not in critical
    assert "\none worker at a time adds its partial to C in host memory\n" in critical
