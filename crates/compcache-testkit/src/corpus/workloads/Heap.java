// Grows a heap like those of Java programs until it is as many MB as the first argument says; prints "ready"; waits.
import java.net.URI;
import java.nio.file.*;
import java.util.*;
import java.util.stream.*;

public class Heap {
    record Row(String key, Integer place, Double weight, List<String> tags) {}

    static final List<Object> kept = new ArrayList<>();
    static final Map<String, List<Long>> index = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        long wanted = Long.parseLong(arguments[0]) << 20;
        Random random = new Random(1);
        List<Path> classes;
        try (Stream<Path> all = Files.walk(FileSystems.getFileSystem(URI.create("jrt:/")).getPath("/modules/java.base"))) {
            classes = all.filter(path -> path.toString().endsWith(".class")).sorted().collect(Collectors.toList());
        }
        Runtime runtime = Runtime.getRuntime();
        for (int nth = 0; runtime.totalMemory() - runtime.freeMemory() < wanted; nth++) {
            Path path = classes.get(nth % classes.size());
            byte[] bytes = Files.readAllBytes(path);
            if (nth % 9 == 0) kept.add(bytes);
            // The constants of a class file are the words of the program it came from.
            String[] words = new String(bytes, "ISO-8859-1").split("[^A-Za-z0-9/]+");
            List<Row> rows = new ArrayList<>();
            Map<String, Object> document = new LinkedHashMap<>();
            for (int place = 0; place < words.length; place++) {
                String word = words[place];
                index.computeIfAbsent(word, unused -> new ArrayList<>()).add((long) nth * 65536 + place);
                if (place % 3 == 0) rows.add(new Row(nth + ":" + place, place, random.nextDouble(), List.of(word, path.toString())));
                if (place % 4 == 0) document.put(word, place % 8 == 0 ? (Object) Integer.valueOf(place) : word.split("/"));
            }
            kept.add(rows);
            kept.add(document);
            if (nth % 2 == 0) kept.add(new TreeMap<>(document));
            if (nth % 5 == 0) kept.add(random.doubles(200).toArray());
            if (nth % 5 == 1) kept.add(document.toString());
            if (nth % 7 == 0) kept.remove(random.nextInt(kept.size()));
        }
        System.out.println("ready");
        System.out.flush();
        while (System.in.read() >= 0) {}
        System.exit(kept.isEmpty() ? 1 : 0);
    }
}
