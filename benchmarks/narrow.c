/* A processor without AVX-512, for code whose `cpuid` was replaced by `int3; nop`.

   Preloaded, it answers the traps with what `cpuid` says, less the bits of AVX-512. */

#define _GNU_SOURCE
#include <signal.h>
#include <ucontext.h>

enum { EXTENDED = 7, STATE = 13 };

/* Leaf 7: AVX512F, DQ, IFMA, PF, ER, CD, BW, VL; then VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; then
   4VNNIW, 4FMAPS, VP2INTERSECT, FP16. Its second page: BF16. Leaf 13: the registers' state. */
static const unsigned HIDDEN_B = 0xdc230000u, HIDDEN_C = 0x5842u, HIDDEN_D = 0x80010cu;
static const unsigned HIDDEN_BF16 = 0x20u, HIDDEN_STATE = 0xe0u;

static void answer(int number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *next = (const unsigned char *)registers[REG_RIP];
    if (next[-1] != 0xcc || next[0] != 0x90) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    const unsigned leaf = registers[REG_RAX], page = registers[REG_RCX];
    unsigned a = leaf, b, c = page, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (leaf == EXTENDED && page == 0) {
        b &= ~HIDDEN_B;
        c &= ~HIDDEN_C;
        d &= ~HIDDEN_D;
    } else if (leaf == EXTENDED && page == 1) {
        a &= ~HIDDEN_BF16;
    } else if (leaf == STATE && page == 0) {
        a &= ~HIDDEN_STATE;
    }
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 1;
}

__attribute__((constructor)) static void install(void)
{
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGTRAP, &action, 0);
}
