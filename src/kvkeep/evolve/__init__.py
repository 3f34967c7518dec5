"""Search for a policy: programs that choose entries are changed, run in a sandbox, and kept where they do better."""
