/* json.c -- see json.h. The reader is a state machine over `expect`; a flag per
 * open container tells objects from arrays. */
#include "json.h"

#include <string.h>

/* --- text ---------------------------------------------------------------- */
void
cer_text_clear(cer_text *text)
{
    cer_free(text->bytes);
    memset(text, 0, sizeof *text);
}

static bool
reserve(cer_text *text, size_t more)
{
    size_t needed, capacity = text->capacity == 0 ? 256 : text->capacity;
    char *bytes;

    if (text->failed || !cer_add_size(text->len, more, &needed))
        goto failed;
    if (needed <= text->capacity)
        return true;
    while (capacity < needed) {
        if (!cer_mul_size(capacity, 2, &capacity))
            goto failed;
    }
    bytes = cer_realloc(text->bytes, capacity);
    if (bytes == NULL)
        goto failed;
    text->bytes = bytes;
    text->capacity = capacity;
    return true;

failed:
    text->failed = true;
    return false;
}

void
cer_text_add(cer_text *text, const char *bytes, size_t len)
{
    if (len == 0 || !reserve(text, len))
        return;
    memcpy(text->bytes + text->len, bytes, len);
    text->len += len;
}

void
cer_text_add_char(cer_text *text, char c)
{
    if (reserve(text, 1))
        text->bytes[text->len++] = c;
}

void
cer_text_add_cstr(cer_text *text, const char *string)
{
    cer_text_add(text, string, strlen(string));
}

void
cer_text_add_u64(cer_text *text, uint64_t value)
{
    char digits[20]; /* of 2**64 - 1 */
    size_t at = sizeof digits;

    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    cer_text_add(text, digits + at, sizeof digits - at);
}

void
cer_text_add_i64(cer_text *text, int64_t value)
{
    if (value < 0)
        cer_text_add_char(text, '-');
    cer_text_add_u64(text, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
}

static void
add_escape(cer_text *text, unsigned char c)
{
    static const char hex[] = "0123456789abcdef";
    char unicode[] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
    const char *names = "\"\"\\\\\nn\tt\rr\bb\ff";

    for (; *names != '\0'; names += 2) {
        if ((unsigned char)names[0] == c) {
            cer_text_add_char(text, '\\');
            cer_text_add_char(text, names[1]);
            return;
        }
    }
    cer_text_add(text, unicode, sizeof unicode);
}

void
cer_json_add_string(cer_text *text, const char *utf8, size_t len)
{
    size_t plain = 0; /* start of the run not yet written */

    cer_text_add_char(text, '"');
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)utf8[i];

        if (c < 0x20 || c == '"' || c == '\\') {
            cer_text_add(text, utf8 + plain, i - plain);
            add_escape(text, c);
            plain = i + 1;
        }
    }
    cer_text_add(text, utf8 + plain, len - plain);
    cer_text_add_char(text, '"');
}

void
cer_json_add_pointer(cer_text *text, const char *token, size_t len)
{
    size_t plain = 0; /* start of the run not yet written */

    for (size_t i = 0; i < len; i++) {
        if (token[i] == '~' || token[i] == '/') {
            cer_text_add(text, token + plain, i - plain);
            cer_text_add_cstr(text, token[i] == '~' ? "~0" : "~1");
            plain = i + 1;
        }
    }
    cer_text_add(text, token + plain, len - plain);
}

/* --- reader -------------------------------------------------------------- */
enum {
    EXPECT_VALUE,        /* anywhere a value must come */
    EXPECT_VALUE_OR_END, /* after [ */
    EXPECT_KEY_OR_END,   /* after { */
    EXPECT_COMMA_OR_END, /* after a member of a container */
    EXPECT_NOTHING,      /* after the whole value */
};

void
cer_json_init(cer_json_reader *reader, const char *text, size_t len)
{
    reader->start = reader->at = text;
    reader->end = text + len;
    reader->problem = NULL;
    reader->expect = EXPECT_VALUE;
    reader->depth = 0;
}

static cer_json_kind
invalid(cer_json_reader *reader, const char *problem)
{
    reader->problem = problem;
    return CER_JSON_INVALID;
}

static void
skip_space(cer_json_reader *reader)
{
    while (reader->at < reader->end &&
           (*reader->at == ' ' || *reader->at == '\n' || *reader->at == '\t' ||
            *reader->at == '\r'))
        reader->at++;
}

static cer_json_kind
finish_value(cer_json_reader *reader, cer_json_kind kind)
{
    reader->expect = reader->depth == 0 ? EXPECT_NOTHING : EXPECT_COMMA_OR_END;
    return kind;
}

/* The length of the valid UTF-8 sequence at `at`, or 0. */
static size_t
utf8_sequence(const unsigned char *at, const unsigned char *end)
{
    size_t n = at[0] < 0x80 ? 1 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    uint32_t code = n == 1 ? at[0] : at[0] & (0x7fu >> n);
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};

    if ((at[0] >= 0x80 && at[0] < 0xc2) || at[0] > 0xf4 ||
        (size_t)(end - at) < n)
        return 0;
    for (size_t i = 1; i < n; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (at[i] & 0x3f);
    }
    if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return 0;
    return n;
}

static int
hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* The length of the escape at `at` (a backslash), or 0. */
static size_t
escape_length(const char *at, const char *end)
{
    if (end - at < 2)
        return 0;
    if (at[1] != 'u')
        return at[1] != '\0' && strchr("\"\\/bfnrt", at[1]) != NULL ? 2 : 0;
    if (end - at < 6)
        return 0;
    for (int i = 2; i < 6; i++) {
        if (hex_digit(at[i]) < 0)
            return 0;
    }
    return 6;
}

/* clang-format off */
/* Characters that stand for themselves and do not end the string: ASCII without
 * controls, quote and backslash. */
#define PLAIN_8 1, 1, 1, 1, 1, 1, 1, 1
static const uint8_t is_plain[256] = {
    [0x20] = 1, 1, 0, 1, 1, 1, 1, 1, /* not the quote */
    [0x28] = PLAIN_8, PLAIN_8, PLAIN_8, PLAIN_8, PLAIN_8, PLAIN_8,
    [0x58] = 1, 1, 1, 1, 0, 1, 1, 1, /* not the backslash */
    [0x60] = PLAIN_8, PLAIN_8, PLAIN_8, PLAIN_8,
};
/* clang-format on */

/* Reads a string, from its opening quote past its closing one. */
static bool
read_string(cer_json_reader *reader, cer_json_token *token)
{
    const char *at = reader->at + 1, *end = reader->end;

    token->text = at;
    token->escaped = false;
    while (at < end && *at != '"') {
        size_t n;

        if (is_plain[(unsigned char)*at]) {
            at++;
            continue;
        }
        if (*at == '\\') {
            n = escape_length(at, end);
            token->escaped = true;
        } else {
            n = (unsigned char)*at < 0x20
                    ? 0
                    : utf8_sequence((const unsigned char *)at,
                                    (const unsigned char *)end);
        }
        if (n == 0)
            return false;
        at += n;
    }
    if (at == end)
        return false;
    token->len = (size_t)(at - token->text);
    reader->at = at + 1;
    return true;
}

static const char *
skip_digits(const char *at, const char *end)
{
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at;
}

static bool
read_number(cer_json_reader *reader, cer_json_token *token)
{
    const char *at = reader->at, *end = reader->end, *digits;

    token->text = at;
    if (at < end && *at == '-')
        at++;
    digits = at;
    at = skip_digits(at, end);
    if (at == digits || (*digits == '0' && at - digits > 1))
        return false;
    if (at < end && *at == '.') {
        digits = ++at;
        at = skip_digits(at, end);
        if (at == digits)
            return false;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        digits = at;
        at = skip_digits(at, end);
        if (at == digits)
            return false;
    }
    token->len = (size_t)(at - token->text);
    reader->at = at;
    return true;
}

static cer_json_kind
read_word(cer_json_reader *reader)
{
    static const struct {
        const char *word;
        cer_json_kind kind;
    } words[] = {{"true", CER_JSON_TRUE},
                 {"false", CER_JSON_FALSE},
                 {"null", CER_JSON_NULL}};

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        size_t len = strlen(words[i].word);

        if ((size_t)(reader->end - reader->at) >= len &&
            memcmp(reader->at, words[i].word, len) == 0) {
            reader->at += len;
            return finish_value(reader, words[i].kind);
        }
    }
    return invalid(reader, "unknown word");
}

static cer_json_kind
open_container(cer_json_reader *reader, bool is_object)
{
    if (reader->depth == CER_JSON_DEPTH)
        return invalid(reader, "nested too deep");
    reader->is_object[reader->depth++] = is_object;
    reader->at++;
    reader->expect = is_object ? EXPECT_KEY_OR_END : EXPECT_VALUE_OR_END;
    return is_object ? CER_JSON_OBJECT : CER_JSON_ARRAY;
}

static cer_json_kind
close_container(cer_json_reader *reader)
{
    bool is_object = reader->is_object[reader->depth - 1];

    reader->depth--;
    reader->at++;
    return finish_value(reader,
                        is_object ? CER_JSON_OBJECT_END : CER_JSON_ARRAY_END);
}

static cer_json_kind
read_value(cer_json_reader *reader, cer_json_token *token)
{
    char c = *reader->at;

    if (c == '{' || c == '[')
        return open_container(reader, c == '{');
    if (c == '"') {
        if (!read_string(reader, token))
            return invalid(reader, "broken string");
        return finish_value(reader, CER_JSON_STRING);
    }
    if (c == '-' || (c >= '0' && c <= '9')) {
        if (!read_number(reader, token))
            return invalid(reader, "broken number");
        return finish_value(reader, CER_JSON_NUMBER);
    }
    return read_word(reader);
}

static cer_json_kind
read_key(cer_json_reader *reader, cer_json_token *token)
{
    if (reader->at == reader->end || *reader->at != '"' ||
        !read_string(reader, token))
        return invalid(reader, "expected a key");
    skip_space(reader);
    if (reader->at == reader->end || *reader->at != ':')
        return invalid(reader, "expected a colon");
    reader->at++;
    reader->expect = EXPECT_VALUE;
    return CER_JSON_KEY;
}

/* After a member: a comma and the next member, or the container's end. */
static cer_json_kind
read_next_member(cer_json_reader *reader, cer_json_token *token)
{
    bool is_object = reader->is_object[reader->depth - 1];

    if (*reader->at == (is_object ? '}' : ']'))
        return close_container(reader);
    if (*reader->at != ',')
        return invalid(reader, "expected a comma or an end");
    reader->at++;
    skip_space(reader);
    if (is_object)
        return read_key(reader, token);
    if (reader->at == reader->end)
        return invalid(reader, "truncated");
    return read_value(reader, token);
}

static cer_json_kind
next_kind(cer_json_reader *reader, cer_json_token *token)
{
    skip_space(reader);
    if (reader->at == reader->end) {
        if (reader->expect == EXPECT_NOTHING)
            return CER_JSON_END;
        return invalid(reader, "truncated");
    }
    switch (reader->expect) {
    case EXPECT_VALUE:
        return read_value(reader, token);
    case EXPECT_VALUE_OR_END:
        return *reader->at == ']' ? close_container(reader)
                                  : read_value(reader, token);
    case EXPECT_KEY_OR_END:
        return *reader->at == '}' ? close_container(reader)
                                  : read_key(reader, token);
    case EXPECT_COMMA_OR_END:
        return read_next_member(reader, token);
    default:
        return invalid(reader, "text after the end");
    }
}

cer_json_kind
cer_json_next(cer_json_reader *reader, cer_json_token *token)
{
    token->text = "";
    token->len = 0;
    token->escaped = false;
    token->kind = next_kind(reader, token);
    return token->kind;
}

const char *
cer_json_peek(cer_json_reader *reader)
{
    skip_space(reader);
    return reader->at;
}

/* --- values of tokens ---------------------------------------------------- */
static uint32_t
hex4(const char *at)
{
    uint32_t code = 0;

    for (int i = 0; i < 4; i++)
        code = code << 4 | (uint32_t)hex_digit(at[i]);
    return code;
}

static size_t
put_utf8(uint32_t code, char *out)
{
    static const unsigned char marks[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;

    for (size_t i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)(marks[n] | code);
    return n;
}

/* Decodes the \u escape at `at`, with its second half if it is a surrogate;
 * the number of characters read, or 0. */
static size_t
decode_unicode(const char *at, const char *end, uint32_t *code)
{
    uint32_t low;

    *code = hex4(at + 2);
    if (*code < 0xd800 || *code > 0xdfff)
        return 6;
    if (*code > 0xdbff || end - at < 12 || at[6] != '\\' || at[7] != 'u')
        return 0;
    low = hex4(at + 8);
    if (low < 0xdc00 || low > 0xdfff)
        return 0;
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return 12;
}

static char
simple_escape(char c)
{
    switch (c) {
    case 'b':
        return '\b';
    case 'f':
        return '\f';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 't':
        return '\t';
    default:
        return c;
    }
}

size_t
cer_json_unescape(const cer_json_token *token, char *out)
{
    const char *at = token->text, *end = at + token->len;
    char *put = out;

    while (at < end) {
        uint32_t code;
        size_t n;

        if (*at != '\\') {
            *put++ = *at++; /* runs are short: byte by byte is fast enough */
        } else if (at[1] != 'u') {
            *put++ = simple_escape(at[1]);
            at += 2;
        } else {
            n = decode_unicode(at, end, &code);
            if (n == 0)
                return SIZE_MAX;
            put += put_utf8(code, put);
            at += n;
        }
    }
    return (size_t)(put - out);
}

bool
cer_json_is(const cer_json_token *token, const char *string)
{
    return !token->escaped && token->len == strlen(string) &&
           memcmp(token->text, string, token->len) == 0;
}

bool
cer_json_u64(const cer_json_token *token, uint64_t *out)
{
    uint64_t value = 0;

    if (token->kind != CER_JSON_NUMBER || token->len == 0)
        return false;
    for (size_t i = 0; i < token->len; i++) {
        uint64_t digit = (uint64_t)(token->text[i] - '0');

        if (token->text[i] < '0' || token->text[i] > '9' ||
            value > (UINT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return true;
}

bool
cer_json_i64(const cer_json_token *token, int64_t *out)
{
    bool negative = token->len > 0 && token->text[0] == '-';
    cer_json_token digits = *token;
    uint64_t value;

    digits.text += negative;
    digits.len -= negative;
    if (!cer_json_u64(&digits, &value) ||
        value > (uint64_t)INT64_MAX + negative)
        return false;
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}
