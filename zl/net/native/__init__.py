"""The wire's fast code in C++, an option: `zl.net.codec` is the truth, and serves alone too."""
