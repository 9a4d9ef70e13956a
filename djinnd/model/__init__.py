"""How a family's own modules are run block by block over flat buffers and paged KV.

block        a decoder layer. Its module is the family's own (family/adapter.py). Its parameters are views of one
             flat buffer (weights/layout.py), which has a place on the device (placing/placed_block.py).
cache        pages of keys and values. A block's attention has its views of the pool (BlockKV), and a step's batch
             says where the tokens' pages are (paged_batch.py).
weight form  the bytes in which a block is stored and copied: plain, or packed (PackedForm). A packed block is
             unpacked before it runs (kernels/packed/unpack.py), or products read it directly
             (kernels/packed/product.py).
"""
