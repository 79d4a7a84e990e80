"""The same work done by others: peers in environments of their own, and the bare limits in ours."""
