"""The kernels: codes, schemes and producers, each written once, and the template kernels where they meet."""
