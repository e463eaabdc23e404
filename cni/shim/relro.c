#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/auxv.h>
#include <sys/mman.h>

/* Makes the pointers that were relocated at the start read-only. musl does so in dynamic programs alone
 * (ldso/dynlink.c, reloc_all; crt/rcrt1.c, of static ones, does not). */
__attribute__((constructor)) static void protect_relocated_pointers(void)
{
    const ElfW(Phdr) *headers = (const ElfW(Phdr) *)getauxval(AT_PHDR), *relro = NULL;
    uintptr_t base = 0, page = getauxval(AT_PAGESZ);
    for (unsigned long i = 0; i < getauxval(AT_PHNUM); i++) {
        if (headers[i].p_type == PT_PHDR)
            base = (uintptr_t)headers - headers[i].p_vaddr;
        if (headers[i].p_type == PT_GNU_RELRO)
            relro = &headers[i];
    }
    if (relro == NULL || page == 0)
        return;
    uintptr_t start = (base + relro->p_vaddr) / page * page;
    uintptr_t end = (base + relro->p_vaddr + relro->p_memsz) / page * page;
    if (end > start)
        (void)mprotect((void *)start, end - start, PROT_READ);
}
