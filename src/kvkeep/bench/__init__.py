"""The benchmark: policies, budgets and tasks, one prefill for each sample."""
