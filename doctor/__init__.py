"""Looks at this machine and the cluster before a run: PASS, WARN or FAIL, and the fix, a line each."""
