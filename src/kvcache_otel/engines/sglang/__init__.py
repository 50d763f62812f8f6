"""SGLang: its unified radix cache, HiCache's tiers below it, with either tree core."""
