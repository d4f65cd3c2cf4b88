// The product of small matrices by a warp.
#pragma once
#include "numbers.cuh"

// c (16 x 8) += a (16 x 16) b (16 x 8): operands of DTYPE, sums in float32. Lane 4 g + q holds of a the rows g and g + 8
// (a[0] and a[1] at columns 2 q and 2 q + 1, a[2] and a[3] at those 8 further), of b column g (b0 and b1 at the same
// places), of c the rows g (c[0], c[1]) and g + 8 (c[2], c[3]) at columns 2 q and 2 q + 1.
template <int DTYPE>
QCTS_INLINE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (DTYPE == BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
