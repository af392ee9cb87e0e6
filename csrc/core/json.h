/* json.h -- a text buffer and a small strict JSON reader and writer for the
 * header of a safetensors file and the structure inside it.
 *
 * The reader is a pull parser over a text that it neither copies nor changes.
 * It accepts exactly RFC 8259 with valid UTF-8, nested at most CER_JSON_DEPTH
 * deep; it does not interpret the text, so the caller must reject duplicate
 * keys. Numbers stay text: the caller knows their type. */
#ifndef CER_JSON_H
#define CER_JSON_H

#include "base.h"

/* --- text ----------------------------------------------------------------
 * Running out of memory sets `failed` and returns no error: check it once, at
 * the end. */
typedef struct cer_text {
    char *bytes; /* not terminated by a NUL */
    size_t len, capacity;
    bool failed;
} cer_text;

void cer_text_clear(cer_text *text); /* frees; zero bytes are an empty text */
void cer_text_add(cer_text *text, const char *bytes, size_t len);
void cer_text_add_char(cer_text *text, char c);
void cer_text_add_cstr(cer_text *text, const char *string);
void cer_text_add_u64(cer_text *text, uint64_t value);
void cer_text_add_i64(cer_text *text, int64_t value);

/* Adds a JSON string with its quotes; escapes only where required. */
void cer_json_add_string(cer_text *text, const char *utf8, size_t len);

/* Adds a reference token of a JSON pointer (RFC 6901), without its slash. */
void cer_json_add_pointer(cer_text *text, const char *token, size_t len);

/* --- reader -------------------------------------------------------------- */
#define CER_JSON_DEPTH 1024

typedef enum cer_json_kind {
    CER_JSON_INVALID, /* see reader.problem; the reader stays where it is */
    CER_JSON_END,     /* the value is complete and nothing follows it */
    CER_JSON_OBJECT,
    CER_JSON_OBJECT_END,
    CER_JSON_ARRAY,
    CER_JSON_ARRAY_END,
    CER_JSON_KEY, /* its value comes next */
    CER_JSON_STRING,
    CER_JSON_NUMBER,
    CER_JSON_TRUE,
    CER_JSON_FALSE,
    CER_JSON_NULL,
} cer_json_kind;

typedef struct cer_json_token {
    cer_json_kind kind;
    const char *text; /* number: its characters; key, string: between quotes */
    size_t len;
    bool escaped; /* the string has escapes: see cer_json_unescape */
} cer_json_token;

typedef struct cer_json_reader {
    const char *start, *at, *end;
    const char *problem; /* why the last token was CER_JSON_INVALID */
    int expect;          /* allowed next tokens; private */
    uint32_t depth;
    uint8_t is_object[CER_JSON_DEPTH]; /* of each open container */
} cer_json_reader;

/* The text must outlive the reader and its tokens. */
void cer_json_init(cer_json_reader *reader, const char *text, size_t len);
cer_json_kind cer_json_next(cer_json_reader *reader, cer_json_token *token);

/* Where the next token begins. */
const char *cer_json_peek(cer_json_reader *reader);

/* Writes the decoded key or string, at most token->len bytes of UTF-8, and
 * returns the number of bytes; SIZE_MAX for a lone surrogate escape, which has
 * no UTF-8. */
size_t cer_json_unescape(const cer_json_token *token, char *out);

/* Whether a key or string is exactly `string`. */
bool cer_json_is(const cer_json_token *token, const char *string);

/* Converts a number token to an integer; false if it has a fraction or an
 * exponent, or does not fit. */
bool cer_json_u64(const cer_json_token *token, uint64_t *out);
bool cer_json_i64(const cer_json_token *token, int64_t *out);

#endif
