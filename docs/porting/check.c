/* Holds a port in C against golden vectors: cc -O2 -o check check.c && ./check FOLDER...
 *
 * Each FOLDER holds the vectors of one op. Every tensor's digest is held against its case file. For
 * an op that has a port below, the call is laid into memory between red zones, run, and every byte
 * compared: of outputs, of inputs, of gaps and zones. Exit 0: all is right; 1: something is not.
 * One file, C99 with 128-bit integers, no library: start your own port from it.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ZONE 64 /* bytes before and behind each allocation that nothing may touch */

static void fail(const char *what, const char *where) {
    fprintf(stderr, "check: %s: %s\n", where, what);
    exit(2);
}

static void *allocate(size_t size) {
    void *memory = calloc(1, size ? size : 1);
    if (!memory) fail("out of memory", "allocate");
    return memory;
}

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot be read", path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *content = allocate(*size + 1);
    if (fread(content, 1, *size, file) != *size) fail("cannot be read", path);
    fclose(file);
    return content;
}

/* ------------------------------------------------------------------ SHA-256 */

static uint32_t turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void sha256(const unsigned char *data, size_t size, char hex[65]) {
    static uint32_t k[64];
    uint32_t h[8];
    /* The constants are the first bits behind the point of roots of the first primes. */
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    if (!k[0]) {
        int found = 0;
        for (int n = 2; found < 64; n++) {
            int prime = 1;
            for (int d = 2; d * d <= n; d++) prime &= n % d != 0;
            if (!prime) continue;
            /* floor(cbrt(n) * 2^32), by halving; cubes stay below 2^106. */
            unsigned __int128 low = 0, high = (unsigned __int128)8 << 32;
            while (high - low > 1) {
                unsigned __int128 middle = (low + high) / 2;
                if (middle * middle * middle <= (unsigned __int128)n << 96)
                    low = middle;
                else
                    high = middle;
            }
            k[found++] = (uint32_t)low;
        }
    }
    memcpy(h, start, sizeof h);
    size_t padded = (size + 9 + 63) / 64 * 64;
    unsigned char *message = allocate(padded);
    memcpy(message, data, size);
    message[size] = 0x80;
    for (int i = 0; i < 8; i++) message[padded - 1 - i] = (unsigned char)((uint64_t)size * 8 >> 8 * i);
    for (size_t at = 0; at < padded; at += 64) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++) {
            const unsigned char *p = message + at + 4 * i;
            w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
        }
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) +
                   (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        memcpy(s, h, sizeof s);
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t t = s[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                         k[i] + w[i];
            uint32_t u = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) +
                         ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += t;
            s[0] = t + u;
        }
        for (int i = 0; i < 8; i++) h[i] += s[i];
    }
    free(message);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", h[i]);
}

/* ------------------------------------------------------------------ JSON, as the case files use it */

typedef struct Value {
    char kind; /* { [ " or 0 (number, true, false, null: the text as written) */
    char *text, *key;
    struct Value *first, *next;
} Value;

static char *skip(char *p) {
    while (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t') p++;
    return p;
}

static char *parse(char *p, Value *into);

static char *parse_string(char *p, char **into) {
    char *start = ++p;
    /* Names and digests hold no escapes; `about` may, and is not read. */
    while (*p && *p != '"') p += *p == '\\' ? 2 : 1;
    *into = allocate((size_t)(p - start) + 1);
    memcpy(*into, start, (size_t)(p - start));
    return p + 1;
}

static char *parse(char *p, Value *into) {
    memset(into, 0, sizeof *into);
    p = skip(p);
    into->kind = *p == '{' || *p == '[' || *p == '"' ? *p : 0;
    if (*p == '"') return parse_string(p, &into->text);
    if (!into->kind) {
        char *start = p;
        while (*p && !strchr(",]} \n\r\t", *p)) p++;
        into->text = allocate((size_t)(p - start) + 1);
        memcpy(into->text, start, (size_t)(p - start));
        return p;
    }
    char end = *p == '{' ? '}' : ']';
    Value **last = &into->first;
    for (p = skip(p + 1); *p && *p != end; p = skip(p)) {
        char *key = NULL;
        if (*p == ',') p = skip(p + 1);
        if (end == '}') p = skip(parse_string(p, &key)) + 1;
        *last = allocate(sizeof **last);
        p = parse(p, *last);
        (*last)->key = key;
        last = &(*last)->next;
    }
    return p + 1;
}

static Value *get(const Value *object, const char *key) {
    for (Value *v = object ? object->first : NULL; v; v = v->next)
        if (v->key && !strcmp(v->key, key)) return v;
    return NULL;
}

static Value *need(const Value *object, const char *key) {
    Value *found = get(object, key);
    if (!found) fail("this key is missing", key);
    return found;
}

static long long number(const Value *v) { return strtoll(v->text, NULL, 10); }

/* ------------------------------------------------------------------ a call in memory */

typedef struct {
    const char *path, *dtype;
    long long shape[8], stride[8];
    int dims, size;               /* of an element, in bytes */
    unsigned char *data;          /* its first element */
    const unsigned char *content; /* in the safetensors file, one element after the other */
    size_t bytes;                 /* of that content */
} Leaf;

typedef struct {
    Leaf leaves[128];
    int count;
    unsigned char *rooms[128], *expected[128]; /* each allocation, and what must be in it afterwards */
    size_t room_bytes[128];
    int room_count;
    const Value *arguments;
} Call;

static const char *base; /* of the safetensors file's data */
static Value *header;

static int element_size(const char *dtype) {
    static const char *const names[] = {"bool 1", "uint8 1", "int8 1", "float8_e4m3fn 1",
        "float8_e5m2 1", "int16 2", "float16 2", "bfloat16 2", "int32 4", "float32 4", "int64 8",
        "float64 8", "complex64 8"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i]) - 2;
        if (strlen(dtype) == length && !strncmp(names[i], dtype, length)) return names[i][length + 1] - '0';
    }
    fail("unknown dtype", dtype);
    return 0;
}

/* The content of a tensor; its digest must be the one that the case file names. */
static const unsigned char *content_of(const Value *tensor, size_t *bytes, int *wrong) {
    const Value *entry = need(header, need(tensor, "tensor")->text);
    const Value *range = need(entry, "data_offsets")->first;
    long long from = number(range), to = number(range->next);
    const unsigned char *data = (const unsigned char *)base + from;
    char hex[65];
    *bytes = (size_t)(to - from);
    sha256(data, *bytes, hex);
    if (strcmp(hex, need(tensor, "sha256")->text)) {
        printf("  %s: its digest is another\n", need(tensor, "tensor")->text);
        *wrong = 1;
    }
    return data;
}

/* Copies a leaf's content into memory, element by element, or compares it with what is there. */
static void each(const Leaf *leaf, unsigned char *memory, const unsigned char *content) {
    long long index[8] = {0}, total = 1;
    for (int d = 0; d < leaf->dims; d++) total *= leaf->stride[d] ? leaf->shape[d] : leaf->shape[d] > 0;
    for (long long n = 0; n < total; n++) {
        long long offset = 0;
        for (int d = 0; d < leaf->dims; d++) offset += index[d] * leaf->stride[d];
        memcpy(memory + offset * leaf->size, content + n * leaf->size, (size_t)leaf->size);
        for (int d = leaf->dims - 1; d >= 0; d--) {
            if (++index[d] < (leaf->stride[d] ? leaf->shape[d] : 1)) break;
            index[d] = 0;
        }
    }
}

static void lay(Call *call, const Value *described, int zone, int *wrong) {
    memset(call, 0, sizeof *call);
    call->arguments = need(described, "arguments");
    for (Value *s = need(described, "storages")->first; s; s = s->next) {
        size_t bytes = (size_t)number(need(s, "bytes"));
        size_t room = bytes + 2 * ZONE + 32;
        int n = call->room_count++;
        if (n == 128) fail("too many storages", "lay");
        unsigned char *memory = allocate(room);
        memset(memory, zone, room);
        call->rooms[n] = memory;
        call->room_bytes[n] = room;
        unsigned char *start = memory + ZONE + 16 - (uintptr_t)(memory + ZONE) % 16;
        start += number(need(s, "align"));
        for (Value *l = need(s, "leaves")->first; l; l = l->next) {
            Leaf *leaf = &call->leaves[call->count++];
            leaf->path = need(l, "path")->text;
            leaf->dtype = need(l, "dtype")->text;
            leaf->size = element_size(leaf->dtype);
            for (Value *v = need(l, "shape")->first; v; v = v->next) leaf->shape[leaf->dims++] = number(v);
            int d = 0;
            for (Value *v = need(l, "stride")->first; v; v = v->next) leaf->stride[d++] = number(v);
            leaf->data = start + number(need(l, "offset_bytes"));
            leaf->content = content_of(l, &leaf->bytes, wrong);
            each(leaf, leaf->data, leaf->content);
        }
    }
    for (int n = 0; n < call->room_count; n++) {
        call->expected[n] = allocate(call->room_bytes[n]);
        memcpy(call->expected[n], call->rooms[n], call->room_bytes[n]);
    }
}

static Leaf *leaf_of(Call *call, const char *path) {
    for (int i = 0; i < call->count; i++)
        if (!strcmp(call->leaves[i].path, path)) return &call->leaves[i];
    fail("no such tensor", path);
    return NULL;
}

/* ------------------------------------------------------------------ ports: yours go here */

static long long index_at(const Leaf *leaf, long long i) {
    const unsigned char *p = leaf->data + i * leaf->stride[0] * leaf->size;
    int64_t wide;
    int32_t narrow;
    if (leaf->size == 8) return memcpy(&wide, p, 8), wide;
    return memcpy(&narrow, p, 4), narrow;
}

static long long int_argument(const Call *call, const char *name) {
    return number(need(need(call->arguments, name), "int"));
}

static void c128_cleanup(Call *call) {
    Leaf *slots = leaf_of(call, "req_pool_indices");
    Leaf *lens = leaf_of(call, "seq_lens"), *accepts = leaf_of(call, "accept_lens");
    long long ring = int_argument(call, "ring_size"), drafts = int_argument(call, "num_draft_tokens");
    if (drafts <= 1) return; /* no speculation, nothing to take back */
    for (Value *s = need(need(call->arguments, "states"), "list")->first; s; s = s->next) {
        Leaf *state = leaf_of(call, need(s, "leaf")->text);
        long long half = state->shape[1] / 2;
        for (long long b = 0; b < slots->shape[0]; b++) {
            long long accepted = index_at(accepts, b);
            for (long long d = accepted > 0 ? accepted : 0; d < drafts; d++) {
                long long row = index_at(slots, b) * ring + (index_at(lens, b) + d) % ring;
                unsigned char *p = state->data + row * state->stride[0] * state->size;
                for (long long c = 0; c < 2 * half; c++, p += state->size) {
                    /* -inf: bf16 is the upper half of the fp32 pattern; little-endian memory. */
                    memset(p, 0, (size_t)state->size);
                    if (c >= half) p[state->size - 2] = 0x80, p[state->size - 1] = 0xff;
                }
            }
        }
    }
}

static const struct { const char *op; void (*run)(Call *); } PORTS[] = {
    {"c128_cleanup", c128_cleanup},
};

/* ------------------------------------------------------------------ checking */

static void (*port_of(const char *op))(Call *) {
    for (size_t i = 0; i < sizeof PORTS / sizeof *PORTS; i++)
        if (!strcmp(PORTS[i].op, op)) return PORTS[i].run;
    return NULL;
}

/* Whether a vector is wrong; *ran tells whether a port was held against it. */
static int check(const char *folder, const char *name, int *ran) {
    char path[4096];
    size_t size;
    int wrong = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    Value document;
    parse(read_file(path, &size), &document);
    snprintf(path, sizeof path, "%s/%s", folder, need(&document, "tensors")->text);
    char *tensors = read_file(path, &size);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | (unsigned char)tensors[i];
    header = allocate(sizeof *header);
    base = tensors + 8 + length;
    char *text = allocate(length + 1);
    memcpy(text, tensors + 8, length);
    parse(text, header);

    Value *wanted = need(&document, "wanted");
    void (*run)(Call *) = port_of(need(&document, "op")->text);
    *ran = run != NULL;
    for (int zone = 0x5a; zone <= 0xa5 && !wrong; zone += 0xa5 - 0x5a) {
        Call call;
        size_t bytes;
        lay(&call, need(&document, "calls")->first, zone, &wrong);
        for (Value *w = wanted->first; w; w = w->next) content_of(w, &bytes, &wrong);
        if (!run || wrong) break;
        /* Where a wanted tensor lies in memory, its bytes are due there; all others must stay. */
        for (Value *w = wanted->first; w; w = w->next) {
            Leaf *leaf = leaf_of(&call, w->key);
            for (int n = 0; n < call.room_count; n++)
                if (leaf->data >= call.rooms[n] && leaf->data <= call.rooms[n] + call.room_bytes[n])
                    each(leaf, call.expected[n] + (leaf->data - call.rooms[n]), content_of(w, &bytes, &wrong));
        }
        run(&call);
        for (int n = 0; n < call.room_count; n++)
            for (size_t i = 0; i < call.room_bytes[n]; i++)
                if (call.rooms[n][i] != call.expected[n][i] && !wrong++)
                    printf("  allocation %d, byte %zu: %02x is due, got %02x\n", n, i,
                           call.expected[n][i], call.rooms[n][i]);
        for (int n = 0; n < call.room_count; n++) free(call.rooms[n]), free(call.expected[n]);
    }
    return wrong != 0;
}

int main(int count, char **folders) {
    int vectors = 0, ported = 0, wrong = 0;
    for (int f = 1; f < count; f++) {
        DIR *listing = opendir(folders[f]);
        if (!listing) fail("not a folder", folders[f]);
        for (struct dirent *entry; (entry = readdir(listing));) {
            size_t length = strlen(entry->d_name);
            if (length < 6 || strcmp(entry->d_name + length - 5, ".json")) continue;
            if (!strcmp(entry->d_name, "manifest.json")) continue;
            int ran, bad = check(folders[f], entry->d_name, &ran);
            if (bad) printf("WRONG %s/%s\n", folders[f], entry->d_name);
            vectors++, ported += ran, wrong += bad;
        }
        closedir(listing);
    }
    printf("%d vectors: %d wrong; a port was held against %d, of the others the digests alone\n",
           vectors, wrong, ported);
    return wrong || !vectors;
}
