"""Many runs: `sweep` trains them, `records` reads their results."""
