import sys

from lora_refit.grpo.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
