"""Models of the literature that ours are compared with: CoRelNet and PrediNet, and the original Abstractor."""
