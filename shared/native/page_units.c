/* The units of pages hashed, and copied while they are in the processor's cache.

   A unit is one piece of a page with a checksum of its own; pages are page-first, so all units of a page lie one behind
   the other. What is hashed is the source, which must be private to the caller. */

#include "stream.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "seeds are read as little-endian"
#endif

#define IDENTITY_BYTES 16

/* identities: [pages, 16], whose first 8 bytes are the seed; found: [pages, units]. With a target, page i is copied to
   its page places[i], unless that is negative. Units have more than 240 bytes. */
void hash_units(const uint8_t *source, int64_t unit_bytes, int64_t units, int64_t pages, const uint8_t *identities,
                uint64_t *found, uint8_t *target, const int32_t *places) {
    for (int64_t page = 0; page < pages; page++) {
        uint64_t seed = word(identities + page * IDENTITY_BYTES);
        uint8_t *to = target != 0 && places[page] >= 0 ? target + places[page] * units * unit_bytes : 0;
        for (int64_t unit = 0; unit < units; unit++, source += unit_bytes, found++) {
            *found = xxh3_64(source, unit_bytes, seed);
            if (to == 0) continue;
            put(to, source, unit_bytes);
            to += unit_bytes;
        }
    }
    settle();
}
