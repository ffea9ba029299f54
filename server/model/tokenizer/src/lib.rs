//! The C interface that `tokenizer_ffi.h` describes, over the Hugging Face tokenizers crate.
//! Ownership, errors and threads are stated there; each `unsafe` below relies on that contract.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Once;

use tokenizers::{PostProcessorWrapper, Tokenizer};

/// Ids index tables and embeddings, so a file that claims a larger one is refused, not obeyed.
const MAX_VOCABULARY_SIZE: u32 = 1 << 24;

pub struct MambascopeTokenizer {
    tokenizer: Tokenizer,
    vocabulary_size: u32,
}

#[repr(C)]
pub struct Text {
    data: *mut u8,
    size: usize,
}

#[repr(C)]
pub struct EncodedToken {
    id: u32,
    begin: u32,
    end: u32,
    added: bool,
}

#[repr(C)]
pub struct Encoding {
    tokens: *mut EncodedToken,
    size: usize,
}

/// Gives a buffer away as a pointer and a length; `take_back` is its inverse.
fn give<T>(buffer: Vec<T>) -> (*mut T, usize) {
    let size = buffer.len();
    (Box::into_raw(buffer.into_boxed_slice()) as *mut T, size)
}

unsafe fn take_back<T>(data: *mut T, size: usize) {
    if !data.is_null() {
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(data, size)));
    }
}

/// An empty C++ view may carry a null pointer, which a Rust slice must not.
unsafe fn borrow<'a, T>(data: *const T, size: usize) -> &'a [T] {
    if size == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(data, size)
    }
}

fn text(string: String) -> Text {
    let (data, size) = give(string.into_bytes());
    Text { data, size }
}

/// Runs the body of one C entry: an error or a panic becomes `*error` and None.
unsafe fn guard<T>(error: *mut Text, body: impl FnOnce() -> Result<T, String>) -> Option<T> {
    // The default hook prints the message, which may quote a prompt, to stderr. The error says it.
    static QUIET: Once = Once::new();
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));

    // A panic leaves nothing half-written that matters: the tokenizer is only read, and its cache
    // of words goes unused once its lock is poisoned.
    let reason = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return Some(value),
        Ok(Err(reason)) => reason,
        Err(panic) => {
            let message = panic.downcast::<String>().map(|message| *message).or_else(|panic| {
                panic.downcast::<&str>().map(|message| message.to_string())
            });
            let message = message.unwrap_or_else(|panic| {
                std::mem::forget(panic); // nobody knows what its drop does, so it is not run
                "no message".to_string()
            });
            format!("the tokenizer library panicked: {message}")
        }
    };
    *error = text(reason);
    None
}

/// Trimmed spans leave out the space that begins a word: highlighted text would have gaps, and the
/// bytes of a prompt could not be shared out among its tokens.
fn keep_spaces_in_spans(processor: PostProcessorWrapper) -> PostProcessorWrapper {
    match processor {
        PostProcessorWrapper::ByteLevel(p) => p.trim_offsets(false).into(),
        PostProcessorWrapper::Roberta(p) => p.trim_offsets(false).into(),
        PostProcessorWrapper::Sequence(mut p) => {
            for inner in p.as_mut() {
                *inner = keep_spaces_in_spans(inner.clone());
            }
            p.into()
        }
        other => other,
    }
}

fn load(json: &[u8]) -> Result<MambascopeTokenizer, String> {
    let mut tokenizer = Tokenizer::from_bytes(json).map_err(|e| e.to_string())?;
    // The server refuses a prompt that is too long; a prompt cut or padded in silence would be
    // explained as if it were the one that was sent.
    tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
    tokenizer.with_padding(None);
    if let Some(processor) = tokenizer.get_post_processor().cloned() {
        tokenizer.with_post_processor(Some(keep_spaces_in_spans(processor)));
    }
    let largest = tokenizer.get_vocab(true).into_values().max();
    let largest = largest.ok_or("model.vocab: holds no token")?;
    if largest >= MAX_VOCABULARY_SIZE {
        return Err(format!(
            "model.vocab: id {largest} exceeds the limit of {MAX_VOCABULARY_SIZE} ids"
        ));
    }
    let loaded = MambascopeTokenizer { tokenizer, vocabulary_size: largest + 1 };
    // A template that names a token the vocabulary lacks would fail every request.
    encode(&loaded, b"", true).map_err(|e| format!("post_processor: {e}"))?;
    Ok(loaded)
}

fn encode(
    t: &MambascopeTokenizer,
    bytes: &[u8],
    add_special: bool,
) -> Result<Vec<EncodedToken>, String> {
    if bytes.len() > u32::MAX as usize {
        return Err(format!("text: {} bytes exceed the limit {}", bytes.len(), u32::MAX));
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|e| format!("text: not valid UTF-8 at byte {}", e.valid_up_to()))?;
    let encoded = t.tokenizer.encode(text, add_special).map_err(|e| format!("text: {e}"))?;
    // The model uses ids as rows of its embedding.
    if let Some(id) = encoded.get_ids().iter().find(|&&id| id >= t.vocabulary_size) {
        let size = t.vocabulary_size;
        return Err(format!("text: token {id} is not in [0, {size}), the vocabulary"));
    }
    Ok(encoded
        .get_ids()
        .iter()
        .zip(encoded.get_offsets())
        .zip(encoded.get_special_tokens_mask())
        .map(|((&id, &(begin, end)), &mask)| EncodedToken {
            id,
            begin: begin.min(bytes.len()) as u32,
            end: end.min(bytes.len()) as u32,
            added: mask != 0,
        })
        .collect())
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_tokenizer_load(
    json: *const u8,
    size: usize,
    error: *mut Text,
) -> *mut MambascopeTokenizer {
    guard(error, || load(borrow(json, size)))
        .map_or(std::ptr::null_mut(), |tokenizer| Box::into_raw(Box::new(tokenizer)))
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_tokenizer_free(tokenizer: *mut MambascopeTokenizer) {
    if !tokenizer.is_null() {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(Box::from_raw(tokenizer))));
    }
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_tokenizer_vocabulary_size(
    tokenizer: *const MambascopeTokenizer,
) -> u32 {
    (*tokenizer).vocabulary_size
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_tokenizer_piece(
    tokenizer: *const MambascopeTokenizer,
    id: u32,
    piece: *mut Text,
    special: *mut bool,
    error: *mut Text,
) -> bool {
    guard(error, || {
        let tokenizer = &(*tokenizer).tokenizer;
        let spelling = tokenizer.id_to_token(id).unwrap_or_default();
        *special = tokenizer.get_added_vocabulary().is_special_token(&spelling);
        *piece = text(spelling);
        Ok(())
    })
    .is_some()
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_tokenizer_encode(
    tokenizer: *const MambascopeTokenizer,
    text: *const u8,
    size: usize,
    add_special_tokens: bool,
    encoding: *mut Encoding,
    error: *mut Text,
) -> bool {
    guard(error, || {
        let (tokens, size) = give(encode(&*tokenizer, borrow(text, size), add_special_tokens)?);
        *encoding = Encoding { tokens, size };
        Ok(())
    })
    .is_some()
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_tokenizer_decode(
    tokenizer: *const MambascopeTokenizer,
    ids: *const u32,
    size: usize,
    skip_special_tokens: bool,
    decoded: *mut Text,
    error: *mut Text,
) -> bool {
    guard(error, || {
        let tokenizer = &(*tokenizer).tokenizer;
        let string = tokenizer.decode(borrow(ids, size), skip_special_tokens);
        *decoded = text(string.map_err(|e| format!("ids: {e}"))?);
        Ok(())
    })
    .is_some()
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_text_free(text: Text) {
    take_back(text.data, text.size);
}

#[no_mangle]
pub unsafe extern "C" fn mambascope_encoding_free(encoding: Encoding) {
    take_back(encoding.tokens, encoding.size);
}
