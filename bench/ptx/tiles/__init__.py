"""How matrices lie in registers and in shared memory: fragments, operands of wgmma, boxes of TMA."""
