//! What kind of file a program is, from its first bytes and its ELF program headers.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use object::elf::{
    EM_386, EM_AARCH64, EM_ARM, EM_PPC64, EM_RISCV, EM_S390, EM_X86_64, FileHeader64, Machine, STB_WEAK, Sym64,
};
use object::read::StringTable;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader, SectionHeader, Sym};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, ReadRef};

/// What a file is to the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Binary {
    /// A program of this machine, started by this loader (PT_INTERP): LD_PRELOAD works.
    Dynamic(PathBuf),
    /// A program of this machine without a loader.
    Static,
    /// A 32-bit program.
    Bits32,
    /// A 64-bit program of the machine named.
    OtherMachine(&'static str),
    /// ELF, but broken.
    Broken,
    /// `#!`, the interpreter's path, and what follows it on the line.
    Script(PathBuf, Option<String>),
    /// Neither ELF nor a script.
    Other,
}

/// The pager knows this one only.
const OUR_MACHINE: Machine = EM_X86_64;

/// How much of a script the kernel reads for its first line.
const SCRIPT_LINE_BYTES: u64 = 256;

/// Tells what `file` is.
pub fn classify<'data, R: ReadRef<'data>>(file: R) -> Binary {
    let Ok(start) = file.len().and_then(|len| file.read_bytes_at(0, len.min(SCRIPT_LINE_BYTES))) else {
        return Binary::Other;
    };
    if let Some(line) = start.strip_prefix(b"#!") {
        return script(line);
    }
    if !start.starts_with(b"\x7fELF") {
        return Binary::Other;
    }
    match start.get(4) {
        Some(1) => Binary::Bits32,
        Some(2) => elf64(file).unwrap_or(Binary::Broken),
        _ => Binary::Broken,
    }
}

fn elf64<'data, R: ReadRef<'data>>(file: R) -> object::read::Result<Binary> {
    let header = FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    if header.e_machine(endian) != OUR_MACHINE {
        return Ok(Binary::OtherMachine(name(header.e_machine(endian))));
    }
    for segment in header.program_headers(endian, file)? {
        if let Some(loader) = segment.interpreter(endian, file)? {
            return Ok(Binary::Dynamic(OsStr::from_bytes(loader).into()));
        }
    }
    Ok(Binary::Static)
}

/// The number under `name` among the symbols that a shared object shows; `None` if it shows none.
pub fn shown_number<'data, R: ReadRef<'data>>(file: R, name: &str) -> Option<u32> {
    let file = ElfFile64::<Endianness, R>::parse(file).ok()?;
    let symbol = file.dynamic_symbols().find(|symbol| symbol.name() == Ok(name))?;
    let section = file.section_by_index(symbol.section_index()?).ok()?;
    let bytes = section.data_range(symbol.address(), size_of::<u32>() as u64).ok()??;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// The compiler's flag for the sanitizer that a program was built with, if its runtime knows of all memory.
pub fn sanitizer<'data, R: ReadRef<'data>>(file: R) -> Option<&'static str> {
    let parsed = ElfFile64::<Endianness, R>::parse(file).ok()?;
    let (endian, symbols) = (parsed.endian(), parsed.elf_dynamic_symbol_table());
    // All names in one read: to find each in the file would take some programs longer than all else that they begin with (node has 75 000).
    let names = parsed.elf_section_table().section(symbols.string_section()).ok()?.data(endian, file).ok()?;
    let names = StringTable::new(names, 0, names.len() as u64);
    // Whether the runtime is part of the program or in an object of its own.
    // Who only asks for it has it weak, and nowhere.
    let is_there = |symbol: &&Sym64<Endianness>| !(symbol.is_undefined(endian) && symbol.st_bind() == STB_WEAK);
    symbols.iter().filter(is_there).find_map(|symbol| match symbol.name(endian, names).ok()? {
        b"__asan_init" => Some("-fsanitize=address"),
        b"__hwasan_init" => Some("-fsanitize=hwaddress"),
        b"__lsan_init" => Some("-fsanitize=leak"),
        b"__msan_init" => Some("-fsanitize=memory"),
        b"__tsan_init" => Some("-fsanitize=thread"),
        _ => None,
    })
}

fn name(machine: Machine) -> &'static str {
    match machine {
        EM_X86_64 => "x86-64",
        EM_AARCH64 => "64-bit ARM",
        EM_RISCV => "RISC-V",
        EM_PPC64 => "64-bit PowerPC",
        EM_S390 => "IBM Z",
        EM_386 | EM_ARM => "a 32-bit machine",
        _ => "another machine",
    }
}

fn script(line: &[u8]) -> Binary {
    let line = trim_blanks(line.split(|byte| *byte == b'\n').next().unwrap_or_default());
    let end = line.iter().position(is_blank).unwrap_or(line.len());
    if end == 0 {
        return Binary::Other;
    }
    let argument = trim_blanks(&line[end..]);
    let argument = (!argument.is_empty()).then(|| String::from_utf8_lossy(argument).into_owned());
    Binary::Script(OsStr::from_bytes(&line[..end]).into(), argument)
}

/// What the kernel calls a blank there: a carriage return is part of the name.
fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn trim_blanks(text: &[u8]) -> &[u8] {
    let start = text.iter().position(|byte| !is_blank(byte)).unwrap_or(text.len());
    let end = text.iter().rposition(|byte| !is_blank(byte)).map_or(start, |last| last + 1);
    &text[start..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 64-bit ELF file of one program header, of type `p_type`, whose segment is `content`.
    fn elf(machine: u16, p_type: u32, content: &[u8]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([3, 0]);
        file.extend(machine.to_le_bytes());
        file.extend(1u32.to_le_bytes());
        file.extend(0u64.to_le_bytes());
        file.extend(64u64.to_le_bytes());
        file.extend(0u64.to_le_bytes());
        file.extend(0u32.to_le_bytes());
        for half in [64u16, 56, 1, 64, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        file.extend(p_type.to_le_bytes());
        file.extend(4u32.to_le_bytes());
        for word in [120, 0, 0, content.len() as u64, content.len() as u64, 1] {
            file.extend(word.to_le_bytes());
        }
        file.extend(content);
        file
    }

    #[test]
    fn a_dynamic_program_names_its_loader() {
        let file = elf(OUR_MACHINE.0, 3, b"/lib64/ld-linux-x86-64.so.2\0");
        assert_eq!(classify(&file[..]), Binary::Dynamic("/lib64/ld-linux-x86-64.so.2".into()));
    }

    #[test]
    fn a_program_without_a_loader_is_static() {
        assert_eq!(classify(&elf(OUR_MACHINE.0, 1, b"code")[..]), Binary::Static);
    }

    #[test]
    fn foreign_and_broken_programs_are_told_apart() {
        assert_eq!(classify(&elf(243, 1, b"")[..]), Binary::OtherMachine("RISC-V"));
        assert_eq!(classify(&b"\x7fELF\x01\x01\x01"[..]), Binary::Bits32);
        assert_eq!(classify(&b"\x7fELF\x02\x01\x01"[..]), Binary::Broken);
        assert_eq!(classify(&elf(OUR_MACHINE.0, 3, b"no end")[..]), Binary::Broken);
    }

    #[test]
    fn a_script_names_its_interpreter_and_one_argument() {
        let script = |text: &str| classify(text.as_bytes());
        assert_eq!(script("#!/bin/sh\necho"), Binary::Script("/bin/sh".into(), None));
        let env = Binary::Script("/usr/bin/env".into(), Some("-S python3 -u".into()));
        assert_eq!(script("#! /usr/bin/env  -S python3 -u \nx"), env);
        assert_eq!(script("#!\n"), Binary::Other);
        assert_eq!(script("#! \t\n"), Binary::Other);
        assert_eq!(script("#!/bin/sh\r\n"), Binary::Script("/bin/sh\r".into(), None));
    }

    #[test]
    fn anything_else_is_other() {
        assert_eq!(classify(&b""[..]), Binary::Other);
        assert_eq!(classify(&b"echo hello\n"[..]), Binary::Other);
    }
}
