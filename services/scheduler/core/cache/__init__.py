"""The prefix tree, where its nodes are resident, how hot they are, and which of them leave a pool."""
