//! Lists in pages: keyset positions and the opaque cursor that carries them.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::problem::{Code, Problem};

/// Items per page when the caller names none.
pub const DEFAULT_LIMIT: u32 = 50;
/// Most items per page.
pub const MAX_LIMIT: u32 = 200;

/// One page of a list. Every list of the API has this shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// The items, newest first unless the route says otherwise.
    pub items: Vec<T>,
    /// Pass it as `cursor` to get the next page; null at the end.
    pub next_cursor: Option<String>,
}

/// The part of a list's query that names the page.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// Items per page, 1 to 200; 50 when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before, under the same filters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// The last row of a page in the order `(at DESC, id DESC)`: the next page starts after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The row's time in the list's order.
    pub at: Ts,
    /// The row's id; breaks ties.
    pub id: Uuid,
}

/// What a port gets: how many rows, and after which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// 1 to [`MAX_LIMIT`].
    pub limit: u32,
    /// Start after this row; from the newest when none.
    pub after: Option<Position>,
}

/// What a port answers.
#[derive(Clone, Debug)]
pub struct Slice<T> {
    /// At most `limit` items.
    pub items: Vec<T>,
    /// The position of the last item when more follow.
    pub next: Option<Position>,
}

impl<T> Slice<T> {
    /// From one row more than was asked for: the usual way to learn whether more follow.
    pub fn from_overfetch(mut items: Vec<T>, limit: u32, position: impl Fn(&T) -> Position) -> Self {
        let limit = limit as usize;
        let next = (items.len() > limit && limit > 0).then(|| position(&items[limit - 1]));
        items.truncate(limit);
        Self { items, next }
    }
}

/// What a cursor holds: the position, and a hash of the filters it was made under.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CursorBody {
    v: u8,
    pos: Position,
    filter_hash: String,
}

/// Writes a cursor for `position` under `filters` (the list's query without `limit` and `cursor`, plus the list's name).
pub fn encode_cursor(position: Position, filters: &str) -> String {
    let body = CursorBody { v: 1, pos: position, filter_hash: filter_hash(filters) };
    // Three plain fields always serialise; an empty cursor would be refused on the way back.
    URL_SAFE_NO_PAD.encode(serde_json::to_vec(&body).unwrap_or_default())
}

/// Reads a cursor back.
///
/// # Errors
/// `cursor.invalid` when the text is not ours or was made under other filters.
pub fn decode_cursor(text: &str, filters: &str) -> Result<Position, Problem> {
    let invalid =
        |why: &str| Problem::new(Code::CursorInvalid, format!("the cursor {why}; start again without `cursor`"));
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| invalid("is not one of ours"))?;
    let body: CursorBody = serde_json::from_slice(&bytes).map_err(|_| invalid("is not one of ours"))?;
    if body.v != 1 {
        return Err(invalid("has an unknown version"));
    }
    if body.filter_hash != filter_hash(filters) {
        return Err(invalid("was made under other filters"));
    }
    Ok(body.pos)
}

/// FNV-1a, 64 bit (<http://www.isthe.com/chongo/tech/comp/fnv/>): notices changed filters, keeps no secret.
fn filter_hash(filters: &str) -> String {
    let hash = filters
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_comes_back_only_under_its_own_filters() {
        let position = Position { at: Ts::from_micros(5), id: Uuid::from_u128(9) };
        let cursor = encode_cursor(position, "runs?status=failed");
        assert_eq!(decode_cursor(&cursor, "runs?status=failed"), Ok(position));
        for (text, filters) in [(cursor.as_str(), "runs?status=success"), ("x", ""), ("", ""), ("e30", "")] {
            assert!(decode_cursor(text, filters).unwrap_err().is(Code::CursorInvalid), "{text}");
        }
    }

    #[test]
    fn one_row_more_than_asked_for_means_another_page() {
        let position = |n: &u128| Position { at: Ts::from_micros(0), id: Uuid::from_u128(*n) };
        let slice = Slice::from_overfetch(vec![3, 2, 1], 2, position);
        assert_eq!((slice.items, slice.next), (vec![3, 2], Some(position(&2))));
        assert_eq!(Slice::from_overfetch(vec![3, 2], 2, position).next, None);
    }
}
